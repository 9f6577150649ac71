"""The size limit of a cache: how many blocks it holds, and which ones are evicted.

All corpora in a cache folder share its limit. A counter, mapped by all processes, is raised before a block is written
and lowered after one is freed, so a killed process can only leave it too high; it is counted anew before anything is
evicted because of it. The least recently read blocks go first, whichever corpus they belong to. Not done here: small
files (.idx, manifests), which are neither counted nor removed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdata.block_cache.block_table import ABSENT, PRESENT, TABLE, WRITING, BlockTable
from mdata.errors import ResourceError, UsageError, counted
from mdata.indexed.pair_format import BLOCK_BYTES
from mdata.util import atomic_io
from mdata.util.config_text import parse_size

CachePlace = tuple[str | None, str | None]
"""A cache's folder, and the size that its blocks may have ("500 GiB")."""

FEWEST_BLOCKS = 4
_LOCK, _COUNT = "room.lock", "room.count"
_SPARE_BYTES = 10 << 30  # what is left free of the disk, or a twentieth of it
_FEWEST_EVICTED = 4
_TRIES, _PAUSE_S = 100, 0.05
_FULL = (errno.ENOSPC, errno.EDQUOT)


def most_blocks(size: str | None) -> int | None:
    """The blocks of a limit such as "500 GiB"; None: no limit but the disk.

    Raises:
        UsageError: not a size, or fewer than four blocks.
    """
    if not size:
        return None
    count = (parse_size(size) or 0) // BLOCK_BYTES
    if count < FEWEST_BLOCKS:
        raise UsageError(
            f"cache_size {size!r} cannot be used",
            expected=f'a size of at least {FEWEST_BLOCKS * BLOCK_BYTES >> 20} MiB, such as "500 GiB"',
        )
    return count


class CacheRoom:
    """The room of a cache folder; for any number of processes and threads.

    Args:
        folder: of the cache; each folder in it belongs to a corpus.
        most: blocks of all corpora; None: until little of the disk is left free.

    Raises:
        OSError: what the file system said.
    """

    def __init__(self, folder: Path, most: int | None) -> None:
        self.folder, self.most = folder, most
        self._lock = folder / _LOCK
        self._lock.touch()
        with (folder / _COUNT).open("a+b") as file:
            if file.tell() < 8:
                os.truncate(file.fileno(), 8)
            self._count: NDArray[np.int64] = np.frombuffer(mmap.mmap(file.fileno(), 8), np.int64)

    def capacity(self) -> int:
        """How many blocks fit, those that are there included: by the limit and by the disk."""
        free = self._free_bytes() - (self._spare_bytes() if self.most is None else 0)
        fits = self._counted() + max(0, free) // BLOCK_BYTES
        return fits if self.most is None else min(fits, self.most)

    def put(self, table: BlockTable, block: int, *, data: bytes) -> None:
        """Write a block, evicting others if there is no room; the caller holds its claim and has checked its bytes.

        If the disk is full, or all blocks that could go are being written, it tries again for some seconds. Only one
        process at a time does so: otherwise the next one would take the room that this one made.

        Raises:
            ResourceError: there is no room, and no block can go. OSError: any other error of the system.
        """
        with self._alone():
            reserved = self._reserve(table, block)
        if reserved and self._write(table, block, data, release=self._alone):
            return
        for _ in range(_TRIES):
            with self._alone():
                if reserved:  # so the disk was full
                    self._evict(_FEWEST_EVICTED)
                reserved = self._reserve(table, block)
                if reserved and self._write(table, block, data, release=nullcontext):
                    return
            time.sleep(_PAUSE_S)
        raise self._no_room()

    def _reserve(self, table: BlockTable, block: int) -> bool:
        """Whether there is room for a block; if so, it is counted."""
        if table.state(block) == ABSENT:
            if not self._has_room():
                return False
            self._count += 1
        table.set(block, WRITING)
        return True

    def _write(
        self, table: BlockTable, block: int, data: bytes, *, release: Callable[[], AbstractContextManager[None]]
    ) -> bool:
        """Whether a reserved block could be written; if not, its room is freed."""
        written = False
        try:
            table.write(block, data)
            table.set(block, PRESENT)
            written = True
        except OSError as error:
            if error.errno not in _FULL:
                raise
        finally:
            if not written:
                with release():
                    table.drop(block)
                    self._count -= 1
        return written

    def _has_room(self) -> bool:
        """Whether there is room for one more block, after evicting others if needed."""
        if self.most is not None and int(self._count[0]) >= self.most:
            self._count[0] = self._counted()
            # Some more than needed, since this reads all tables.
            too_many = int(self._count[0]) + 1 - self.most
            return too_many <= 0 or self._evict(too_many + self.most // 64) >= too_many
        if self.most is None and self._free_bytes() < self._spare_bytes():
            self._evict(_FEWEST_EVICTED)
        return True

    def _counted(self) -> int:
        return sum(int(np.count_nonzero(table.states())) for table in self._tables())

    def _free_bytes(self) -> int:
        disk = os.statvfs(self.folder)
        return disk.f_bavail * disk.f_frsize

    def _spare_bytes(self) -> int:
        """What is left free of the disk if the cache has no limit."""
        disk = os.statvfs(self.folder)
        return min(_SPARE_BYTES, disk.f_blocks * disk.f_frsize // 20)

    def _evict(self, count: int) -> int:
        """Evict up to `count` blocks, the least recently read first; how many were."""
        tables = list(self._tables())
        there = [np.flatnonzero(table.states()) for table in tables]
        used = np.concatenate([table.used[blocks] for table, blocks in zip(tables, there, strict=True)])
        owners = np.repeat(np.arange(len(tables)), [len(blocks) for blocks in there])
        numbers = np.concatenate(there)
        evicted = 0
        for place in np.argsort(used, kind="stable").tolist():
            if evicted == count:
                break
            table, block = tables[owners[place]], int(numbers[place])
            with table.claim(block, wait=False) as ours:  # a block that is being fetched stays
                if ours and table.state(block) != ABSENT:
                    table.drop(block)
                    self._count -= 1
                    evicted += 1
        return evicted

    def _tables(self) -> Iterator[BlockTable]:
        """The tables of all corpora."""
        for path in sorted(self.folder.glob(f"*/{TABLE}")):
            with suppress(FileNotFoundError):  # being removed by somebody
                yield BlockTable(path.parent)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        fd = atomic_io.open_no_link(self._lock, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)  # a process forked meanwhile has the descriptor, too
        finally:
            os.close(fd)

    def _no_room(self) -> ResourceError:
        return ResourceError(
            f"{self.folder} has no room for another block, and no block in it can be evicted",
            found=f"{counted(int(self._count[0]), 'block')} of 4 MiB, {self._free_bytes() >> 20} MiB of disk left",
            expected="room for the blocks that are read at the same time",
            fix="free some disk space, name a cache on a larger disk, or set a larger cache_size",
        )
