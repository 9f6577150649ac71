"""Where built arrays are cached: beside the corpus, in a folder that is given, or in the user's cache folder.

All folders are searched, and new arrays go to the first that is writable: the given folder (option `cache`, or the
environment variable MDATA_CACHE), otherwise `cache` beside the corpus, otherwise `mdata` in the user's cache folder
(XDG_CACHE_HOME, ~/.cache). Unless a folder was given, arrays that are built faster than a file is read are not cached:
each process builds them in memory. store.py says what an entry is and which process builds it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mdata.progress import SILENT, Progress

if TYPE_CHECKING:
    from mdata.array_cache.store import Arrays, Make

VARIABLE = "MDATA_CACHE"
FOLDER = "cache"
# Entries of arrays that are built in a few hundredths of a second.
_SMALL = 1 << 20


@dataclass(frozen=True)
class CacheRequest:
    """A logged request for arrays: which, their path (None: in memory), rows and bytes, and whether they were built."""

    name: str
    corpus: str
    path: Path | None
    rows: int
    num_bytes: int
    seconds: float
    built: bool


@dataclass(frozen=True)
class Cache:
    """A cache of arrays that take long to build.

    Args:
        folder: of the cache; None: see above.
        mapped: false: they are read into memory.
        all: cache small arrays too.
        progress: receives a note on arrays that are built.
        log: every request is appended to it.
    """

    folder: str | None = None
    mapped: bool = True
    all: bool = False
    progress: Progress = SILENT
    log: list[CacheRequest] = field(default_factory=list)

    def arrays(self, beside: Path, key: Mapping[str, Any], *, make: Make, entries: Callable[[], int]) -> Arrays:
        """The arrays of a key, read-only.

        Args:
            beside: the file of the corpus.
            key: see `mdata.array_cache.store.cached`; its `name` and `corpus` are logged.
            make: builds them.
            entries: about how many numbers they hold; called if they are not cached yet.

        Raises:
            ResourceError, UsageError: the disk is full, or the given folder cannot be written.
        """
        from mdata.array_cache.store import cached, entry_path, find  # most datasets build no array

        start, made = time.perf_counter(), list[bool]()

        def make_now() -> Iterable[Arrays]:
            made.append(True)  # if several processes need the same arrays, one builds them and the others wait
            return make()

        folders = self._folders(beside)
        hits = ((folder, find(folder, key, progress=self.progress, mapped=self.mapped)) for folder in folders)
        folder, arrays = next((hit for hit in hits if hit[1] is not None), (None, None))
        if arrays is None and not self.all and not self._given and entries() < _SMALL:
            arrays = in_memory(make_now)
        elif arrays is None:
            folder = next((candidate for candidate in folders if _can_be_written(candidate)), folders[0])
            # `find` has already reported problems with an entry there.
            arrays = cached(folder, key, make=make_now, mapped=self.mapped)
        path = None if folder is None else entry_path(folder, key)
        rows = max((len(array) for array in arrays.values()), default=0)
        sizes = sum(array.nbytes for array in arrays.values())
        seconds = time.perf_counter() - start
        self.log.append(CacheRequest(str(key["name"]), str(key["corpus"]), path, rows, sizes, seconds, bool(made)))
        return arrays

    def __reduce__(self) -> tuple[object, ...]:
        """Without progress and log, which belong to this process."""
        return Cache, (self.folder, self.mapped, self.all)

    @property
    def _given(self) -> str | None:
        return self.folder or os.environ.get(VARIABLE)

    def _folders(self, beside: Path) -> list[Path]:
        if self._given:
            return [Path(self._given)]
        users = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        folders = [beside.parent / FOLDER]
        with suppress(RuntimeError):  # no home folder, as of a container's user whom /etc/passwd does not name
            folders.append(Path(users).expanduser() / "mdata")
        return folders


def in_memory(make: Make) -> Arrays:
    """Build the arrays in memory."""
    parts = list(make())
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _can_be_written(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
