"""A cache of blocks as slow as can be: the specification of mdata/block_cache for one reader.

Blocks are read in the order of the tokens. One that is not there is fetched, and if there are too many then, the one
that was read longest ago goes. What is read never depends on what was there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class SlowBlockCache:
    """Blocks of some .bin files.

    Args:
        shards: tokens of each .bin. in_block: tokens of a block. most: blocks that may be there.
        fetched: hears of every block that is fetched.

    Attributes:
        there: blocks that are there, (shard, number), the one read longest ago first.
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
