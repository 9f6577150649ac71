"""Resolves the path of a corpus to its manifest, or to the prefix of a .bin/.idx pair.

If there is neither, the error suggests what the user most likely means: the corpus that `mdata preprocess` made for
that prefix, or a similar name. Nothing is opened here.
"""

from __future__ import annotations

import os
from pathlib import Path

from mdata.errors import UsageError, os_errors_named
from mdata.indexed.pair_format import bin_path, idx_path
from mdata.manifest.sidecars import manifest_path
from mdata.util.atomic_io import partial_path

BARE_ENDINGS = (".bin", ".idx")
_TEXT_ENDINGS = (".jsonl", ".txt", ".gz", ".zst", ".bz2", ".xz", ".parquet")


def prefix_of(path: Path) -> Path:
    """`x` of `x`, `x.bin` or `x.idx`."""
    return path.with_suffix("") if path.suffix in BARE_ENDINGS else path


def check_prefix(output_prefix: str) -> None:
    """Refuse an output prefix without a name, such as "folder/".

    Raises:
        UsageError: as above.
    """
    if output_prefix.endswith("/") or not Path(output_prefix).name.strip():
        folder = output_prefix.rstrip("/ ")
        raise UsageError(
            f"output prefix {output_prefix!r} has no name after its folder",
            fix=f"{folder}/NAME" if folder else "a name, such as NAME",
        )


def manifest_of(path: Path) -> Path | None:
    """The manifest at a path; None for a bare pair.

    Raises:
        UsageError: neither a manifest nor a pair exists there, a run was stopped before it had named them, or the path
            cannot be looked at.
    """
    # `is_file` and `exists` raise where a folder must not be read, or a name is too long.
    with os_errors_named(f"opening {path}"):
        if path.suffix == ".json":
            return path
        if path.name in ("", ".."):
            raise UsageError(f"{str(path)!r} is not a corpus", expected="a manifest, or the prefix of a .bin/.idx pair")
        prefix = prefix_of(path)
        beside = manifest_path(prefix)
        if beside.is_file():
            return beside
        if not idx_path(prefix).is_file():
            from mdata.object_storage.address import refuse_address

            refuse_address(path)
            refuse_unfinished(prefix)
            raise UsageError(
                f"{path}: neither a manifest nor a .bin/.idx pair exists there",
                expected=f"{beside.name} or {idx_path(prefix).name}",
                fix=_meant(path) or "check the path; a prefix is a path without .bin",
            )
        return None


def refuse_unfinished(prefix: Path) -> None:
    """Refuse a pair that is not finished, as `unfinished_file` tells.

    Raises:
        UsageError: names the file.
    """
    if path := unfinished_file(prefix):
        raise UsageError(
            f"{prefix} is not finished: the command that writes it is still running, or was stopped at its end",
            found=f"{path.name} beside it",
            fix="wait, or run the same command again to complete it",
        )


def unfinished_file(prefix: Path) -> Path | None:
    """The manifest or .idx of a pair, if it still has its temporary name and none has the final one."""
    paths = (path for path in (manifest_path(prefix), idx_path(prefix)) if not path.exists())
    return next((partial_path(path) for path in paths if partial_path(path).exists()), None)


def _meant(path: Path) -> str | None:
    """The most likely meaning of a path that is not a corpus."""
    if path.suffix in _TEXT_ENDINGS and path.is_file():
        return f"make a corpus of it with mdata preprocess --input {path}"
    if os.path.isfile(path / "data.json"):  # noqa: PTH113 - False for a path that is too long
        return f"this is the folder of a run: mtrain status {path}, mdata trace {path}"
    if partial_path(bin_path(prefix_of(path))).exists():
        return "wait for the command that writes it, or, if it was interrupted, run it again"
    if pair := min(path.glob("*.idx"), default=None):
        return f"this is a folder: name a corpus in it, such as {pair.with_suffix('')}"
    try:
        names = [
            file.name.removesuffix(file.suffix) for file in path.parent.iterdir() if file.suffix in (".json", ".idx")
        ]
    except OSError:
        return None
    from mdata.util.option_synonyms import nearest

    # `mdata preprocess` puts key and level behind the prefix that it is given.
    longer = [name for name in sorted(names) if name.startswith(f"{path.name}_")]
    close = longer[0] if longer else nearest(path.name, names)
    return f"{path.with_name(close)}?" if close else None
