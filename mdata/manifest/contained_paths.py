"""Paths that a manifest names: they must lie inside its folder, and files must be regular files.

A manifest may come from a stranger. Without these checks a name such as `../../secret`, a link, or a device would be
opened, and reading a device may never end. A path is inside if, with all links followed, it lies below the manifest's
folder or below the folder in which the manifest's own file really lies. So a folder of links into one store (a model
hub's cache) works like a copy of it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from mdata.errors import UsageError, os_errors_named


def path_inside(manifest: Path, name: str, *, allow_outside: bool = False) -> Path:
    """The path that a manifest names, whether or not it exists.

    Args:
        manifest: the manifest's file.
        name: the name in the manifest, relative to its folder.
        allow_outside: the user allowed paths outside the folder.

    Raises:
        UsageError: it leads out of the folder.
    """
    path = manifest.parent / name
    if allow_outside:
        return path
    real = os.path.realpath(path)
    if not any(real != folder and os.path.commonpath((real, folder)) == folder for folder in _folders(manifest)):
        raise UsageError(
            f"{manifest} names {name}, which lies outside its folder",
            found=real,
            expected=f"a name inside {manifest.parent}",
            fix="if you trust whoever made the manifest, copy it into the folder, or give --allow-outside"
            " (in Python allow_outside=True, in the configuration of a run data.allow_outside)",
        )
    return path


def file_inside(manifest: Path, name: str, *, allow_outside: bool = False) -> Path:
    """The regular file that a manifest names; arguments as for `path_inside`.

    Raises:
        UsageError: it leads out of the folder, does not exist, or is a folder, a device, a pipe or a socket.
    """
    path = path_inside(manifest, name, allow_outside=allow_outside)
    with os_errors_named("reading"):
        mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise UsageError(f"{path} is not a regular file", fix="restore the file that the manifest names")
    return path


def shards_inside(manifest: Path, names: Sequence[str], *, allow_outside: bool = False) -> list[Path]:
    """The prefixes of pairs that a manifest names; other arguments as for `path_inside`.

    Their .bin and .idx may be links: large files are often kept elsewhere, and the user who made the links chose where.
    So only folders are checked, each once, however many thousand pairs it holds.

    Raises:
        UsageError: one leads out of the folder.
    """
    folders = {"": manifest.parent}
    prefixes = []
    for name in names:
        folder, _, last = name.rpartition("/")
        is_plain = last not in ("", ".", "..")
        if not is_plain or folder not in folders:
            prefixes.append(path_inside(manifest, name, allow_outside=allow_outside))
            if is_plain:
                folders[folder] = prefixes[-1].parent
        else:
            prefixes.append(folders[folder] / last)
    return prefixes


def _folders(manifest: Path) -> tuple[str, str]:
    """The folder of the manifest's path, and that of its file with links followed."""
    return os.path.realpath(manifest.parent), os.path.dirname(os.path.realpath(manifest))  # noqa: PTH120


def files_inside(manifest: Path, folder: str, *, allow_outside: bool = False) -> dict[str, bytes]:
    """The contents of the regular files, other than hidden ones, in a folder that a manifest names, by name.

    Raises:
        UsageError: the folder, or a file in it, lies outside the manifest's folder. OSError: it is gone.
    """
    path = path_inside(manifest, folder, allow_outside=allow_outside)
    names = [file.name for file in sorted(path.iterdir()) if file.is_file() and not file.name.startswith(".")]
    return {name: file_inside(manifest, f"{folder}/{name}", allow_outside=allow_outside).read_bytes() for name in names}
