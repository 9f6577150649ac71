"""A file that is written from start to end under a temporary name, then committed: renamed to its final name.

While it grows it can be synced, so that a journal can record how much is on disk; a later process opens it at that sync
point and continues. Unusual: a name proves nothing. A process that resumes compares the last bytes before the sync
point, and only the file that was opened here is committed or rolled back. The files of a corpus get their final names
together (mdata/preprocessing/placing.py).
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


class SyncPoint(NamedTuple):
    """How many bytes of a file are on disk, and the BLAKE3 of the last of them."""

    size: int
    end: str


class AppendFile:
    """An append-only temporary file beside its final name, locked against a second writer.

    Args:
        path: the final name.
        resume: the sync point of an earlier process from which to continue; None: start a new file.

    Raises:
        UsageError: another process is writing it.
        DamageError: the file is shorter than the sync point, or differs from what was written.
        ResourceError: a file operation failed.
    """

    def __init__(self, path: Path, resume: SyncPoint | None = None) -> None:
        self.path = path
        self.partial = atomic_io.partial_path(path)
        self.size = self._begun = resume.size if resume else 0
        self._synced: SyncPoint | None = None
        self._resting: os.stat_result | None = None
        with os_errors_named(f"creating {path}"):
            self._open = atomic_io.Descriptor(file_lock.open_locked(self.partial, self.size))
        try:
            if resume and self._sync_point() != resume:
                raise DamageError(f"{self.partial} is not what was written", fix="run again, from the beginning")
        except BaseException:
            self.close()
            raise

    def append(self, data: NDArray[Any] | bytes) -> None:
        """Write at the end."""
        raw = data if isinstance(data, bytes) else raw_bytes(data)
        with os_errors_named(f"writing {self.path}"):
            atomic_io.write_all(self._fd, raw)
        self.size += len(raw)
        if self.size - self._begun >= _SYNC_SOON_BYTES:
            atomic_io.sync_soon(self._fd, self._begun, count=self.size - self._begun)
            self._begun = self.size

    def sync(self) -> SyncPoint:
        """Wait until everything appended is on disk; returns the point at which a later process can resume."""
        if self._synced is None or self._synced.size != self.size:
            with os_errors_named(f"writing {self.path}"):
                atomic_io.sync(self._fd)
            self._synced = self._sync_point()
        return self._synced

    def read(self, offset: int, count: int) -> bytes:
        """Read `count` of the appended bytes, or as many as there are.

        Raises:
            DamageError: another program cut the file. ResourceError: it cannot be read.
        """
        stop = min(offset + count, self.size)
        parts = []
        with os_errors_named(f"reading {self.partial}"):
            while offset < stop:
                parts.append(os.pread(self._fd, stop - offset, offset))  # may return less, as of 2 GB and more
                if not parts[-1]:
                    raise DamageError(f"{self.partial} was cut while it was being written", fix="run again")
                offset += len(parts[-1])
        return b"".join(parts)

    def blocks(self, dtype: np.dtype[np.generic]) -> Iterator[NDArray[Any]]:
        """Everything appended so far, as arrays of `dtype`."""
        step = _ENTRIES_AT_ONCE * dtype.itemsize
        for offset in range(0, self.size, step):
            yield np.frombuffer(self.read(offset, min(step, self.size - offset)), dtype)

    def check_name(self) -> None:
        """Check that the temporary name still belongs to this file.

        Raises:
            DamageError: it was removed or replaced.
        """
        if not atomic_io.is_same_file(self._fd, self.partial):
            raise self._removed()

    def commit(self) -> None:
        """Give the file its final name. The caller syncs the file before and the folder after."""
        with os_errors_named(f"finishing {self.path}"):
            self.check_name()
            atomic_io.rename(self.partial, self.path)

    @property
    def committed(self) -> bool:
        """Whether the file has its final name."""
        return atomic_io.is_same_file(self._fd, self.path)

    def roll_back(self) -> None:
        """Undo `commit`; another file with the final name stays."""
        if self.committed:
            atomic_io.rename(self.path, self.partial)

    def rest(self) -> None:
        """Close the file until it is used again; meanwhile only the caller's lock keeps a second writer away."""
        if self._open.fd >= 0:
            self._resting = os.fstat(self._open.fd)
            self._open.close()

    def close(self) -> None:
        """Stop writing; the file keeps its present name."""
        self._resting = None
        self._open.close()

    def discard(self) -> None:
        """Stop writing and delete the file, unless it is committed or closed: then the name may be another writer's."""
        try:
            if self._has_name():
                self.partial.unlink()  # while it is locked: nobody can take it over in between
        finally:
            self.close()

    def _has_name(self) -> bool:
        if self._resting is None:
            return self._open.fd >= 0 and atomic_io.is_same_file(self._open.fd, self.partial)
        try:
            return os.path.samestat(self._resting, self.partial.lstat())
        except FileNotFoundError:
            return False

    @property
    def _fd(self) -> int:
        if self._resting is not None:
            fd = file_lock.open_locked(self.partial, keep_bytes=None)
            before, self._resting = self._resting, None
            self._open = atomic_io.Descriptor(fd)
            if not os.path.samestat(os.fstat(fd), before):
                raise self._removed()
            os.lseek(fd, self.size, os.SEEK_SET)
        return self._open.fd

    def _removed(self) -> DamageError:
        return DamageError(f"{self.partial} was removed while it was being written", fix="run again")

    def _sync_point(self) -> SyncPoint:
        count = min(self.size, _END_BYTES)
        return SyncPoint(self.size, blake3(self.read(self.size - count, count)).hexdigest(length=16))


def raw_bytes(array: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array; Python cannot cast the view of an empty one."""
    return array.data.cast("B") if array.size else memoryview(b"")


def remove_synced(path: Path) -> None:
    """Remove a file if it exists, and wait until the removal is on disk."""
    if path.exists():
        path.unlink()
        atomic_io.sync_folder(path.parent)
