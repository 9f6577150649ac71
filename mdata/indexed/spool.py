"""A file in the making: written from the start to the end under a hidden name, then given its final one.

While it grows it can be synced, so that a journal may say how far it surely goes; a later process opens it
with that many bytes kept and goes on. What is unusual: a spool that already got its final name (the process
died between that and its last word) is taken back under its hidden name by whoever continues.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdata import durable
from mdata.errors import os_errors_named

_ENTRIES_AT_ONCE = 1 << 18  # of an array that is read back: 2 MB of int64
_SYNC_SOON_BYTES = 1 << 24  # often enough that the last sync is short, seldom enough to be free


class Spool:
    """An append-only temporary file beside its final name, locked against a second writer.

    Args:
        path: the final name.
        keep_bytes: how much of what an earlier process wrote stays.

    Raises:
        UsageError: another process is writing it.
        DamageError: less than `keep_bytes` is there.
        ResourceError: the file system refused.
    """

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        self.path = path
        self.partial = durable.partial_path(path)
        self.size = self._begun = keep_bytes
        with os_errors_named(f"creating {path}"):
            if keep_bytes and not self.partial.exists() and path.exists():
                durable.rename(path, self.partial)
            self._fd = durable.open_alone(self.partial, keep_bytes)

    def append(self, data: NDArray[Any] | bytes) -> None:
        """Write at the end."""
        raw = data if isinstance(data, bytes) else raw_bytes(data)
        with os_errors_named(f"writing {self.path}"):
            durable.write_all(self._fd, raw)
        self.size += len(raw)
        if self.size - self._begun >= _SYNC_SOON_BYTES:
            durable.sync_soon(self._fd, self._begun, count=self.size - self._begun)
            self._begun = self.size

    def sync(self) -> None:
        """Wait until everything appended is on the device."""
        with os_errors_named(f"writing {self.path}"):
            durable.sync(self._fd)

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes of what was appended."""
        with os_errors_named(f"reading {self.partial}"):
            return os.pread(self._fd, count, offset)

    def blocks(self, dtype: np.dtype[np.generic]) -> Iterator[NDArray[Any]]:
        """Everything appended so far, as arrays of `dtype`."""
        step = _ENTRIES_AT_ONCE * dtype.itemsize
        for offset in range(0, self.size, step):
            yield np.frombuffer(self.read(offset, min(step, self.size - offset)), dtype)

    def place(self) -> None:
        """Give the final name; what was appended should be synced before. The folder is the caller's to sync."""
        with os_errors_named(f"finishing {self.path}"):
            durable.rename(self.partial, self.path)

    def put_back(self) -> None:
        """Take the final name away again."""
        if self.path.exists() and not self.partial.exists():
            durable.rename(self.path, self.partial)

    def close(self) -> None:
        """End the writing; the file stays under the name it has."""
        os.close(self._fd)

    def remove(self) -> None:
        """End the writing; what has no final name is deleted."""
        os.close(self._fd)
        self.partial.unlink(missing_ok=True)


def raw_bytes(array: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array; Python cannot cast the view of an empty one."""
    return array.data.cast("B") if array.size else memoryview(b"")
