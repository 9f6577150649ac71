"""The page table of the key-value cache: which pages each row holds, as numbers on the host.

A pool is a number of pages of `page_tokens` tokens; blocks with different windows have different pools. A row has a
slot: a line of each pool's table. Blocks with a window give a page back when no later token can see it. A page may
belong to several rows of a beam search; only full pages are shared, so they are never written to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Copy(NamedTuple):
    """A page to copy in every block of a pool."""

    pool: int
    source: int
    target: int


class PagePool:
    """Pages of the blocks of one kind; page 0 belongs to no row.

    Args:
        pages: that rows may hold. last: how many last tokens the blocks see; None: all.
    """

    def __init__(self, pages: int, *, last: int | None) -> None:
        self.pages, self.last = pages, last
        self._free = list(range(pages, 0, -1))
        self._holders = [0] * (pages + 1)

    @property
    def free(self) -> int:
        """Pages that no row holds."""
        return len(self._free)

    def take(self) -> int:
        """A free page."""
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, page: int) -> int:
        """Add a holder to a page; returns it."""
        self._holders[page] += 1
        return page

    def give_back(self, page: int) -> None:
        """Remove a holder of a page."""
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)


class PageTable:
    """The pages of all rows.

    Args:
        pools: of each kind of block. slots: rows at a time. longest: tokens of a row at most.

    Attributes:
        tables: int32[slots, pages of the longest row] for each pool; 0 where a row holds nothing.
    """

    def __init__(self, pools: Sequence[PagePool], *, page_tokens: int, slots: int, longest: int) -> None:
        self.pools, self.page_tokens = tuple(pools), page_tokens
        width = -(-longest // page_tokens)
        self.tables = tuple(np.zeros((slots, width), dtype=np.int32) for _ in pools)
        self._slots = list(range(slots - 1, -1, -1))
        self._ends = np.zeros((slots, len(self.pools)), dtype=np.int64)  # pages of a row, with those given back

    @property
    def free_slots(self) -> int:
        """Rows that may be opened."""
        return len(self._slots)

    @property
    def used(self) -> int:
        """Pages that rows hold, of all pools."""
        return sum(pool.pages - pool.free for pool in self.pools)

    def open(self) -> int:
        """The slot of a new row, which has no pages."""
        return self._slots.pop()

    def close(self, slot: int) -> None:
        """Give back a row's pages and its slot."""
        self._slots.append(slot)
        for pool, table in zip(self.pools, self.tables, strict=True):
            for page in table[slot][table[slot] > 0].tolist():
                pool.give_back(page)
            table[slot] = 0
        self._ends[slot] = 0

    def extend(self, slot: int, length: int) -> bool:
        """Give a row the pages for this many tokens; returns False and changes nothing if a pool has too few."""
        end = -(-length // self.page_tokens)
        if any(end - have > pool.free for have, pool in zip(self._ends[slot].tolist(), self.pools, strict=True)):
            return False
        for number, (pool, table) in enumerate(zip(self.pools, self.tables, strict=True)):
            for at in range(int(self._ends[slot, number]), end):
                table[slot, at] = pool.take()
            self._ends[slot, number] = max(end, self._ends[slot, number])
        return True

    def room_for(self, lengths: Sequence[int], *, chunk: int) -> bool:
        """Whether the pools have pages for new rows of these lengths, which are computed in chunks."""
        return all(
            sum(pages_for(length, last=pool.last, chunk=chunk, page_tokens=self.page_tokens) for length in lengths)
            <= pool.free
            for pool in self.pools
        )

    def forget(self, slot: int, length: int) -> None:
        """Give back the pages that the token after `length` tokens, and all later ones, cannot see."""
        for pool, table in zip(self.pools, self.tables, strict=True):
            gone = 0 if pool.last is None else max(0, length - pool.last + 1) // self.page_tokens
            for at in np.flatnonzero(table[slot, :gone]).tolist():
                pool.give_back(int(table[slot, at]))
                table[slot, at] = 0

    def fork(self, slot: int, length: int) -> tuple[int, list[Copy]] | None:
        """A second row with the same `length` tokens: its slot and the pages to copy; None if too few are free."""
        partly = length % self.page_tokens > 0
        at = length // self.page_tokens
        needs = [partly and table[slot, at] > 0 for table in self.tables]
        if any(need and not pool.free for need, pool in zip(needs, self.pools, strict=True)):
            return None
        new, copies = self.open(), []
        for number, (pool, table) in enumerate(zip(self.pools, self.tables, strict=True)):
            for full in np.flatnonzero(table[slot, :at]).tolist():
                table[new, full] = pool.share(int(table[slot, full]))
            if needs[number]:
                table[new, at] = pool.take()
                copies.append(Copy(number, int(table[slot, at]), int(table[new, at])))
            self._ends[new, number] = at + partly
        return new, copies

    def places(self, pool: int, slot: int, positions: np.ndarray) -> np.ndarray:
        """Where a row's tokens at these positions are: page * page_tokens + offset in the page."""
        pages = self.tables[pool][slot, positions // self.page_tokens].astype(np.int64)
        return pages * self.page_tokens + positions % self.page_tokens


def pages_for(length: int, *, last: int | None, chunk: int, page_tokens: int) -> int:
    """The most pages that a row of this length holds at a time, if it is computed in chunks of this size."""
    all_pages = -(-length // page_tokens)
    # A chunk's first token sees `last` - 1 before it; the window may begin and end inside a page.
    return all_pages if last is None else min(all_pages, -(-(last + chunk) // page_tokens) + 1)
