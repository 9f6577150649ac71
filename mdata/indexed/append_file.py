"""A file in the making: written from the start to the end under a hidden name, then given its final one.

While it grows it can be synced, so that a journal may say how far it surely goes and how it ends there; a later
process opens it with that much kept and goes on. What is unusual: a name proves nothing. Whoever continues compares
the end of what is kept, and only the very file that was opened here is placed or put back. A file that got its final
name before its process died is taken back by mdata/preprocessing/placement.py alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mdata.errors import DamageError, os_errors_named
from mdata.util import atomic_io, file_lock

_ENTRIES_AT_ONCE = 1 << 18  # of an array that is read back: 2 MB of int64
_SYNC_SOON_BYTES = 1 << 24  # often enough that the last sync is short, seldom enough to be free
_END_BYTES = 1 << 16  # of .hashes: what 8 GiB of tokens are


class Kept(NamedTuple):
    """How far a file in the making surely goes, and the BLAKE3 of its last bytes there."""

    size: int
    end: str


class Spool:
    """An append-only temporary file beside its final name, locked against a second writer.

    Args:
        path: the final name.
        kept: what an earlier process wrote and stays; None: nothing.

    Raises:
        UsageError: another process is writing it.
        DamageError: less than what is kept is there, or something else.
        ResourceError: the file system refused.
    """

    def __init__(self, path: Path, kept: Kept | None = None) -> None:
        self.path = path
        self.partial = atomic_io.partial_path(path)
        self.size = self._begun = kept.size if kept else 0
        with os_errors_named(f"creating {path}"):
            self._open = atomic_io.Descriptor(file_lock.open_locked(self.partial, self.size))
        try:
            if kept and self._kept() != kept:
                raise DamageError(f"{self.partial} is not what was written", fix="run again, from the beginning")
        except BaseException:
            self.close()
            raise

    def append(self, data: NDArray[Any] | bytes) -> None:
        """Write at the end."""
        raw = data if isinstance(data, bytes) else raw_bytes(data)
        with os_errors_named(f"writing {self.path}"):
            atomic_io.write_all(self._open.fd, raw)
        self.size += len(raw)
        if self.size - self._begun >= _SYNC_SOON_BYTES:
            atomic_io.sync_soon(self._open.fd, self._begun, count=self.size - self._begun)
            self._begun = self.size

    def sync(self) -> Kept:
        """Wait until everything appended is on the device; what a later process can keep."""
        with os_errors_named(f"writing {self.path}"):
            atomic_io.sync(self._open.fd)
        return self._kept()

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes of what was appended."""
        with os_errors_named(f"reading {self.partial}"):
            return os.pread(self._open.fd, count, offset)

    def blocks(self, dtype: np.dtype[np.generic]) -> Iterator[NDArray[Any]]:
        """Everything appended so far, as arrays of `dtype`."""
        step = _ENTRIES_AT_ONCE * dtype.itemsize
        for offset in range(0, self.size, step):
            yield np.frombuffer(self.read(offset, min(step, self.size - offset)), dtype)

    def place(self) -> None:
        """Give the final name; what was appended should be synced before. The folder is the caller's to sync."""
        with os_errors_named(f"finishing {self.path}"):
            if not atomic_io.is_same_file(self._open.fd, self.partial):
                raise DamageError(f"{self.partial} was removed while it was being written", fix="run again")
            atomic_io.rename(self.partial, self.path)

    @property
    def placed(self) -> bool:
        """Whether the file has its final name."""
        return atomic_io.is_same_file(self._open.fd, self.path)

    def put_back(self) -> None:
        """Take the final name away again; a file of that name which is not ours stays."""
        if self.placed:
            atomic_io.rename(self.path, self.partial)

    def close(self) -> None:
        """End the writing; the file stays under the name it has."""
        self._open.close()

    def remove(self) -> None:
        """End the writing; what has no final name is deleted."""
        try:
            self._open.close()
        finally:
            self.partial.unlink(missing_ok=True)

    def _kept(self) -> Kept:
        count = min(self.size, _END_BYTES)
        return Kept(self.size, blake3(self.read(self.size - count, count)).hexdigest(length=16))


def raw_bytes(array: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array; Python cannot cast the view of an empty one."""
    return array.data.cast("B") if array.size else memoryview(b"")
