"""BLAKE3 of each 4 MiB block of a stream of bytes, finished hashes going to a spool.

Hashes reach the spool when `flush` is called, not before: `update` may run in a thread, and which calls are made to
the disk, and when, must not depend on threads. The hash of a block that is not full yet lives in memory only; who
continues after a crash reads the bytes of that one block again.
"""

from __future__ import annotations

import blake3

from mdata.indexed.append_file import Spool
from mdata.indexed.pair_format import BLOCK_BYTES

HASH_BYTES = 32


class BlockHasher:
    """Hashes blocks of a stream, whatever the pieces in which it comes.

    Args:
        spool: takes the hash of each full block.
        begun: the bytes of the block that is not full, when a stream is continued.
    """

    def __init__(self, spool: Spool, begun: bytes = b"") -> None:
        assert len(begun) < BLOCK_BYTES, "a full block is no longer open"
        self._spool = spool
        self._hasher = blake3.blake3(begun)
        self._filled = len(begun)
        self._finished = bytearray()

    def update(self, data: memoryview) -> None:
        """Take the next bytes of the stream."""
        while data:
            piece = data[: BLOCK_BYTES - self._filled]
            self._hasher.update(piece)
            self._filled += len(piece)
            data = data[len(piece) :]
            if self._filled == BLOCK_BYTES:
                self._finished += self._hasher.digest()
                self._hasher = blake3.blake3()
                self._filled = 0

    def flush(self) -> None:
        """Append the finished hashes to the spool."""
        if self._finished:
            self._spool.append(bytes(self._finished))
            self._finished.clear()

    def all(self) -> tuple[bytes, ...]:
        """The hashes of all blocks, the last of which may be shorter."""
        self.flush()
        done = self._spool.read(0, self._spool.size)
        full = tuple(done[start : start + HASH_BYTES] for start in range(0, len(done), HASH_BYTES))
        return (*full, self._hasher.digest()) if self._filled else full
