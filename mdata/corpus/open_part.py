"""Opens a corpus of a blend, on a disk or at an address in object storage.

The storage library is imported only when an address is opened.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mdata.corpus.corpus import Corpus, open_corpus
from mdata.indexed.reader import Mode
from mdata.manifest.io import load_manifest
from mdata.manifest.types import Manifest

if TYPE_CHECKING:
    from mdata.block_cache.cache_room import CachePlace


def is_stored(path: str | Path) -> bool:
    """Whether a path is an address, or was made from one."""
    if ":/" not in str(path):
        return False
    from mdata.object_storage.address import address_of

    return address_of(path) is not None


def beside(folder: Path, name: str) -> Path:
    """A name in a blend: a path relative to the blend's folder, or an address."""
    return Path(name) if is_stored(name) else folder / name


def open_part(
    path: str | Path,
    *,
    cache: CachePlace = (None, None),
    mode: Mode = "mmap",
    checked: bool = True,
    allow_outside: bool = False,
    content: Manifest | None = None,
) -> Corpus:
    """Open a corpus with `open_corpus`, or, at an address, with `open_stored`.

    Args:
        path: as for `open_corpus`, or an address.
        cache: for a corpus at an address; see `open_stored`.
        mode, checked, allow_outside, content: see `open_corpus`.

    Raises:
        UsageError, DamageError: as `open_corpus` and `open_stored`.
    """
    if not is_stored(path):
        return open_corpus(path, mode=mode, checked=checked, allow_outside=allow_outside, content=content)
    from mdata.corpus.stored_corpus import open_stored

    # Nothing is outside: objects are not links, and every file is copied to the cache.
    return open_stored(path, cache, mode=mode, checked=checked, content=content)


def manifest_at(path: Path, cache: CachePlace) -> Manifest:
    """The manifest at a path or an address; raises what `load_manifest` or `stored_manifest` does."""
    if not is_stored(path):
        return load_manifest(path)
    from mdata.corpus.stored_corpus import stored_manifest

    return stored_manifest(path, cache)
