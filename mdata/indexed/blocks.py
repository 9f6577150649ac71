"""Reads the 4 MiB blocks of a .bin with several threads, in bounded memory, without mapping the file.

Used by commands that check every byte (`mdata verify --full`, `mdata adopt --full`). Reads and hashes release the GIL,
so threads use all cores. A failing disk gives an error for one block, where a map would end the process.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from mdata.indexed.pair_format import BLOCK_BYTES
from mdata.util import atomic_io
from mdata.util.machine_limits import usable_cores

T = TypeVar("T")

_AHEAD = 4  # blocks given out for each thread: enough that none waits for the caller


class BlockFile:
    """A file as a sequence of blocks.

    Raises:
        OSError: from the file system.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.num_blocks = -(-size // BLOCK_BYTES)
        self._size = size
        self._open = atomic_io.Descriptor(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        self._own = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def read(self, number: int) -> memoryview:
        """One block, shorter at the end of the file; the view is valid until this thread reads another one."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(bytearray(BLOCK_BYTES))
        start = number * BLOCK_BYTES
        block: memoryview = self._own.buffer[: min(BLOCK_BYTES, self._size - start)]
        filled = 0
        while filled < len(block) and (count := os.preadv(self._open.fd, [block[filled:]], start + filled)):
            filled += count
        return block[:filled]

    def each(self, look: Callable[[int], T], *, threads: int | None = None) -> Iterator[T]:
        """The results of look(number) for every block, in order; `look` runs in several threads.

        Args:
            look: receives a block's number and may `read` the block.
            threads: default the cores that this process may use.
        """
        threads = min(threads or usable_cores(), self.num_blocks)
        if threads < 2:
            yield from map(look, range(self.num_blocks))
            return
        pool = ThreadPoolExecutor(threads)
        waiting: deque[Future[T]] = deque()
        try:
            for number in range(self.num_blocks):
                waiting.append(pool.submit(look, number))
                if len(waiting) > _AHEAD * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
