"""The corpora that a path in a blend means: one corpus, all below a folder or pattern, or those of another blend.

Below a folder or among the matches of a pattern, every corpus manifest and every .idx counts, except pairs that a
manifest there lists; hidden names, blends and other JSON files are skipped. Links are followed, and a folder that
several names lead to is read once. Results are sorted by name, so every machine finds the same order.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from glob import glob
from pathlib import Path

from mdata.corpus.paths import prefix_of
from mdata.errors import UsageError, explain_os_error
from mdata.manifest.io import load_manifest
from mdata.manifest.types import FORMAT, BlendManifest, CorpusManifest

_MARK = FORMAT.encode()


def blend_at(path: str) -> BlendManifest | None:
    """The blend if the path is a blend manifest; None for any other file."""
    if not path.endswith(".json") or not Path(path).is_file():
        return None
    content = load_manifest(Path(path))
    return content if isinstance(content, BlendManifest) else None


def corpora_at(path: str) -> list[str]:
    """Manifests and prefixes below a folder, or among the matches of a pattern; sorted.

    Raises:
        UsageError: there are none. DamageError: an incomplete manifest.
    """
    if not path:
        raise UsageError("'' is not a corpus", expected="a manifest, a prefix, a folder or a pattern")
    roots = [Path(path)] if Path(path).is_dir() else [Path(match) for match in glob(path, recursive=True)]  # noqa: PTH207
    found: dict[Path, Path] = {}
    try:
        files = _below(roots)
        spoken_for: set[Path] = set()
        for file in files:
            if file.suffix == ".json" and (shards := _shards(file)) is not None:
                found[file] = file
                spoken_for.update(shards)
    except OSError as error:
        raise explain_os_error(error, "looking for corpora") from error
    for file in files:
        if file.suffix == ".idx" and _real(prefix_of(file)) not in spoken_for:
            found[file] = prefix_of(file)
    if not found:
        seen = f"{len(files)} files" if roots else "nothing"
        raise UsageError(f"{path}: no corpus was found", found=seen, expected="manifests or .idx files")
    return [str(found[file]) for file in sorted(found)]


def _below(roots: Iterable[Path]) -> list[Path]:
    """Every file once, under the first of its paths; sorted."""
    found: dict[Path, Path] = {}
    seen: set[Path] = set()
    for root in sorted(roots):
        for file in _files(root, seen):
            found.setdefault(_real(file), file)
    return sorted(found.values())


def _files(root: Path, seen: set[Path]) -> Iterable[Path]:
    """The files below a folder; `seen` collects visited folders, because a link may lead back to one."""
    if not root.is_dir():
        yield root
        return
    for folder, folders, names in os.walk(root, followlinks=True):
        real = Path(folder).resolve()
        # In this order a folder's own name comes before a link to it in the same folder.
        folders[:] = sorted(
            (name for name in folders if real not in seen and not name.startswith(".")),
            key=lambda name: (Path(folder, name).is_symlink(), name),
        )
        if real in seen:
            continue
        seen.add(real)
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _shards(path: Path) -> list[Path] | None:
    """The prefixes that a corpus manifest lists; None for any other file."""
    if not path.is_file() or _MARK not in path.read_bytes():
        return None
    content = load_manifest(path)
    if not isinstance(content, CorpusManifest):
        return None
    return [_real(path.parent / shard.path) for shard in content.shards]


def _real(path: Path) -> Path:
    return path.parent.resolve() / path.name
