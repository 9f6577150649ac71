"""A slow cache of blocks: the specification of mdata/block_cache for one reader.

Blocks are read in the order of the tokens. A block that is not present is fetched; if the cache is full, the least
recently read one is evicted. The tokens that are read never depend on what was cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class SlowBlockCache:
    """A cache of the blocks of some .bin files.

    Args:
        shards: tokens of each .bin. in_block: tokens of a block. most: limit on the blocks.
        fetched: gives the tokens of a block, (shard, number).

    Attributes:
        there: the cached blocks by (shard, number), the least recently read first.
    """

    def __init__(
        self, shards: Sequence[int], *, in_block: int, most: int, fetched: Callable[[tuple[int, int]], Sequence[int]]
    ) -> None:
        self._shards, self._in_block, self._most, self._fetch = shards, in_block, most, fetched
        self.there: dict[tuple[int, int], Sequence[int]] = {}

    def read(self, first: int, count: int) -> list[int]:
        """Tokens [first, first + count), counted over all shards."""
        return [self._token(token) for token in range(first, first + count)]

    def _token(self, token: int) -> int:
        shard = 0
        while token >= self._shards[shard]:
            token -= self._shards[shard]
            shard += 1
        block = shard, token // self._in_block
        if block in self.there:
            content = self.there.pop(block)
        else:
            content = self._fetch(block)
            while len(self.there) >= self._most:
                del self.there[next(iter(self.there))]
        self.there[block] = content
        return content[token % self._in_block]
