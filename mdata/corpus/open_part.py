"""Opening what a blend names: a corpus on a disk, or one at an address in object storage.

Storage is imported where an address is met: who reads from a disk starts without it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdata.corpus.corpus import Corpus, open_corpus
from mdata.manifest.io import load_manifest
from mdata.manifest.types import Manifest

if TYPE_CHECKING:
    from mdata.block_cache.cache_room import CachePlace


def is_stored(path: str | Path) -> bool:
    """Whether a path is, or was, an address."""
    if ":/" not in str(path):
        return False
    from mdata.object_storage.address import address_of

    return address_of(path) is not None


def beside(folder: Path, name: str) -> Path:
    """What a blend in a folder means by a name: a path from there, or an address."""
    return Path(name) if is_stored(name) else folder / name


def open_part(path: str | Path, *, cache: CachePlace = (None, None), **how: Any) -> Corpus:
    """Open a corpus of a blend: as `open_corpus` does it, or at an address, with its blocks in a cache.

    Args:
        path: as of `open_corpus`, or an address.
        cache: folder for what is read of a corpus in storage, and the most bytes of it; see `open_stored`.
        how: as of `open_corpus`.

    Raises:
        UsageError, DamageError: as both.
    """
    if not is_stored(path):
        return open_corpus(path, **how)
    from mdata.corpus.stored_corpus import open_stored

    how.pop("allow_outside", None)  # storage has no links, and names lead to the copy's folder
    return open_stored(path, cache, **how)


def manifest_at(path: Path, cache: CachePlace) -> Manifest:
    """The manifest at a path or an address; raises what `load_manifest` or `stored_manifest` does."""
    if not is_stored(path):
        return load_manifest(path)
    from mdata.corpus.stored_corpus import stored_manifest

    return stored_manifest(path, cache)
