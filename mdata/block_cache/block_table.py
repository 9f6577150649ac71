"""Which blocks of a corpus are on the node's disk: a table that all processes of the node map, and a sparse file.

A block's entry is one number: a count of its changes, and its state. Only the holder of the block's claim changes it; a
claim is a lock on one byte of a file, which ends with its process. Readers take no lock: they compare the entries of
before and after they copied tokens, so a block that was evicted meanwhile is noticed and read again. Not done here:
which blocks are fetched or evicted.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdata.indexed.pair_format import BLOCK_BYTES
from mdata.util import atomic_io
from mdata.util.arrays import Int64s

ABSENT, WRITING, STALE, PRESENT = range(4)
"""Not present; being written, or left half written; written but not compared in this use of the cache; compared."""

_STATE = 3  # the bits of an entry that are the state
_PUNCH = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_ENTRY_BYTES = 16
TABLE, BLOCKS, CLAIMS = "blocks.table", "blocks.bin", "blocks.claims"


class BlockTable:
    """The table of a folder and the file of its blocks.

    Attributes:
        entries: uint32[n], state and number of changes. used: int64[n], when a block was last read, in us of the clock.

    Raises:
        OSError: what the file system said.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with (folder / TABLE).open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        self.num_blocks = len(mapped) // _ENTRY_BYTES
        self.entries: NDArray[np.uint32] = np.frombuffer(mapped, np.uint32, self.num_blocks)
        self.used: Int64s = np.frombuffer(mapped, np.int64, self.num_blocks, offset=8 * self.num_blocks)
        self._claims = folder / CLAIMS
        self.fd = atomic_io.open_no_link(folder / BLOCKS, os.O_RDWR)
        weakref.finalize(self, os.close, self.fd)

    def state(self, block: int) -> int:
        """One of the states."""
        return int(self.entries[block]) & _STATE

    def states(self) -> NDArray[np.uint32]:
        """The states of all blocks."""
        states: NDArray[np.uint32] = self.entries & np.uint32(_STATE)
        return states

    def set(self, block: int, state: int) -> None:
        """Change an entry; only for the holder of its claim."""
        changes = (int(self.entries[block]) >> 2) + 1
        if state == PRESENT:
            self.touch(block)
        self.entries[block] = (changes << 2 | state) & 0xFFFFFFFF

    def touch(self, blocks: int | Int64s) -> None:
        """Note that blocks are read now."""
        self.used[blocks] = time.time_ns() // 1000

    def lacking(self, blocks: Int64s, entries: NDArray[np.uint32]) -> Int64s:
        """Those of some blocks that are not present, by their entries."""
        lacking: Int64s = blocks[(entries & np.uint32(_STATE)) != PRESENT]
        return lacking

    def read(self, block: int, count: int) -> bytes:
        """The first bytes of a block as the file has them; fewer where it ends."""
        return os.pread(self.fd, count, block * BLOCK_BYTES)

    def write(self, block: int, data: bytes) -> None:
        """Put a block's bytes into the file; they are on the device afterwards.

        Raises:
            OSError: what the file system said, such as that it is full.
        """
        view, at = memoryview(data), block * BLOCK_BYTES
        while view:
            count = os.pwrite(self.fd, view, at)
            view, at = view[count:], at + count
        atomic_io.sync(self.fd)

    def drop(self, block: int) -> None:
        """Free a block on the disk; only for the holder of its claim. The entry changes first: holes read as zeros."""
        self.set(block, ABSENT)
        punch_hole(self.fd, block * BLOCK_BYTES, count=BLOCK_BYTES)

    def begin_use(self) -> None:
        """Mark all present blocks as not yet compared in this use; only while nobody else uses the table."""
        there = self.states() == PRESENT
        self.entries[there] = ((self.entries[there] >> 2) + 1 << 2) | STALE

    @contextmanager
    def claim(self, block: int, *, wait: bool = True) -> Iterator[bool]:
        """Hold the claim of a block while the code inside runs; yields False at once if another thread or process holds
        it and `wait` is off.
        """
        fd = atomic_io.open_no_link(self._claims, os.O_RDWR)
        try:
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, _lock(fcntl.F_WRLCK, block))
            except BlockingIOError:
                yield False
                return
            try:
                yield True
            finally:
                # A process forked meanwhile has the descriptor, too, so closing ours would not be enough.
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK, block))
        finally:
            os.close(fd)


def make_table(folder: Path, num_blocks: int) -> None:
    """Make the files of an empty table, unless they exist with the right sizes; for a folder that nobody uses.

    Raises:
        OSError: what the file system said.
    """
    (folder / CLAIMS).touch()
    sizes = {TABLE: num_blocks * _ENTRY_BYTES, BLOCKS: num_blocks * BLOCK_BYTES}
    if all((folder / name).exists() and (folder / name).stat().st_size == size for name, size in sizes.items()):
        return
    for name in sizes:  # the table first here and last below: without it, both are made anew
        (folder / name).unlink(missing_ok=True)
    for name in (BLOCKS, TABLE):
        with atomic_io.atomic_file(folder / name) as fd:
            os.truncate(fd, sizes[name])
            if name == BLOCKS:
                punch_hole(fd, 0, count=BLOCK_BYTES)  # fails now if the file system has no holes


def punch_hole(fd: int, start: int, *, count: int) -> None:
    """Free a part of a file on the disk; from then on it reads as zeros.

    Raises:
        OSError: the file system cannot (EOPNOTSUPP), or what else it said.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, _PUNCH, ctypes.c_longlong(start), ctypes.c_longlong(count)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _lock(kind: int, byte: int) -> bytes:
    """struct flock of one byte from the file's start."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0)
