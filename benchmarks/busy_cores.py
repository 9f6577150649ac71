"""Keeps cores busy without using memory, to measure a core's speed on a machine whose other cores work too.

Each process hashes the same 16 KiB, which stay in the L1 cache. So another program loses speed only to the machine (a
lower clock, hyperthreads, other tenants), not to resources that it shares with these processes.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager

from blake3 import blake3

BLOCK_BYTES = 1 << 14


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """`count` cores at work while the block runs."""
    processes = [multiprocessing.Process(target=_hash_for_ever, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _hash_for_ever() -> None:
    block = os.urandom(BLOCK_BYTES)
    while True:
        blake3(block).digest()
