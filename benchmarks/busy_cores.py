"""Keeps cores busy without touching memory, to tell what a core is worth on a machine whose other cores work too.

Each process hashes the same 16 KiB, which stay in the first cache. So what another program loses meanwhile it loses to
the machine (a lower clock, cores that are halves of cores, other tenants), and to nothing that it shares with these.
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
