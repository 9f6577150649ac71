"""Which blocks hold which tokens: the .bin files of a corpus as one row of 4 MiB blocks. Pure arithmetic.

Each shard begins with a block of its own, and a shard's last block is as short as the shard ends. Tokens are numbered
over all shards, as `Corpus` does it, so a run of tokens always lies in blocks that follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mdata.indexed.pair_format import BLOCK_BYTES
from mdata.util.arrays import Int64s, locate, locate_all, ranges, running_sums


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The blocks of a corpus.

    Attributes:
        item_bytes: of a token. shard_bytes: int64[n], the sizes of the .bin files.
        tokens_before, blocks_before: int64[n + 1], before each shard and in all.
    """

    item_bytes: int
    shard_bytes: Int64s
    tokens_before: Int64s
    blocks_before: Int64s

    @property
    def num_blocks(self) -> int:
        """Blocks of all shards."""
        return int(self.blocks_before[-1])

    def place(self, block: int) -> tuple[int, int, int]:
        """(shard, first byte, end) of a block in its .bin."""
        shard, inside = locate(self.blocks_before, block)  # type: ignore[arg-type]
        start = inside * BLOCK_BYTES
        return shard, start, min(start + BLOCK_BYTES, int(self.shard_bytes[shard]))

    def num_bytes(self, blocks: Int64s) -> int:
        """Bytes of some blocks together."""
        shards, insides = locate_all(self.blocks_before, blocks)
        return int(np.minimum(self.shard_bytes[shards] - insides * BLOCK_BYTES, BLOCK_BYTES).sum())

    def of_runs(self, first: Int64s, count: Int64s) -> Int64s:
        """The blocks of runs of tokens [first, first + count), ascending, each once: int64[m]."""
        if not count.all():
            first, count = first[count > 0], count[count > 0]
        begin, end = self._of_tokens(first), self._of_tokens(first + count - 1)
        return np.unique(ranges(begin, end - begin + 1))

    def _of_tokens(self, tokens: Int64s) -> Int64s:
        shards, insides = locate_all(self.tokens_before, tokens)
        return self.blocks_before[shards] + insides * self.item_bytes // BLOCK_BYTES

    def end_of_block(self, token: int) -> int:
        """The first token after the block that holds a token."""
        shard, inside = locate(self.tokens_before, token)  # type: ignore[arg-type]
        in_block = BLOCK_BYTES // self.item_bytes
        return int(min(self.tokens_before[shard] + (inside // in_block + 1) * in_block, self.tokens_before[shard + 1]))


def layout_of(item_bytes: int, shard_bytes: Sequence[int]) -> BlockLayout:
    """The blocks of shards of these sizes, with tokens of this many bytes."""
    sizes = np.array(shard_bytes, np.int64)
    return BlockLayout(item_bytes, sizes, running_sums(sizes // item_bytes), running_sums(-(-sizes // BLOCK_BYTES)))
