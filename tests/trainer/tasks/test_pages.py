"""Pages: handed out once, given back when no token can see them, shared and copied; the numbers always add up."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.tasks.pages import PagePool, PageTable, pages_for

LONGEST, T = 40, 4


def _table(pages=30, last=None, slots=4):
    return PageTable(
        [PagePool(pages, last=None), PagePool(pages, last=last or 6)], page_tokens=T, slots=slots, longest=LONGEST
    )


def test_a_row_takes_pages_and_gives_them_back():
    table = _table()
    slot = table.open()
    assert table.extend(slot, 5) and table.used == 4 and table.extend(slot, 8) and table.used == 4
    places = table.places(0, slot, np.arange(8))
    assert len(set(places.tolist())) == 8 and places.min() >= T, "page 0 belongs to no row"
    table.close(slot)
    assert table.used == 0 and table.free_slots == 4 and not table.tables[0].any()


def test_a_row_that_does_not_fit_changes_nothing():
    table = _table(pages=3)
    slot = table.open()
    assert table.extend(slot, 8) and not table.extend(slot, 16) and table.used == 4
    assert table.extend(slot, 12)


def test_a_window_gives_pages_back():
    table = _table()
    slot = table.open()
    table.extend(slot, 20)
    for length, first in ((8, 0), (9, 1), (12, 1), (13, 2), (20, 3)):
        table.forget(slot, length)
        assert np.flatnonzero(table.tables[1][slot])[0] == first, "the next token sees 5 before it"
    assert len(np.flatnonzero(table.tables[0][slot])) == 5


@given(st.integers(1, LONGEST), st.integers(1, 12), st.integers(1, 12), st.integers(1, 7))
def test_a_row_never_needs_more_than_it_was_promised(length, last, chunk, page_tokens):
    pool = PagePool(100, last=last)
    table = PageTable([pool], page_tokens=page_tokens, slots=1, longest=LONGEST)
    slot, most = table.open(), 0
    for start in range(0, length, chunk):
        table.forget(slot, start)
        table.extend(slot, min(length, start + chunk))
        most = max(most, table.used)
    assert most <= pages_for(length, last=last, chunk=chunk, page_tokens=page_tokens)


def test_a_fork_shares_full_pages_and_copies_the_last():
    table = _table()
    slot = table.open()
    table.extend(slot, 10)
    before = table.used
    forked = table.fork(slot, 10)
    assert forked is not None
    new, copies = forked
    assert table.used == before + 2 and [copy.pool for copy in copies] == [0, 1]
    assert table.tables[0][new, :2].tolist() == table.tables[0][slot, :2].tolist()
    assert table.tables[0][new, 2] == copies[0].target != table.tables[0][slot, 2] == copies[0].source
    table.close(slot)
    assert table.used == 6, "shared pages have a holder left"
    table.close(new)
    assert table.used == 0


def test_a_fork_at_a_page_border_copies_nothing():
    table = _table(pages=2)
    slot = table.open()
    table.extend(slot, 8)
    assert table.fork(slot, 8) is not None and table.fork(slot, 7) is None, "no page is free for the copy"


@given(
    st.lists(st.tuples(st.sampled_from(["open", "close", "extend", "forget", "fork"]), st.integers(0, 9)), max_size=60)
)
def test_pages_are_held_by_those_who_took_them(calls):
    table, rows = _table(pages=14), dict[int, int]()
    for call, number in calls:
        slot = sorted(rows)[number % len(rows)] if rows else None
        if call == "open" and table.free_slots:
            rows[table.open()] = 0
        elif slot is None:
            continue
        elif call == "close":
            table.close(slot)
            del rows[slot]
        elif call == "extend":
            length = min(LONGEST, rows[slot] + number)
            if table.extend(slot, length):
                rows[slot] = length
        elif call == "forget":
            table.forget(slot, rows[slot])
        elif call == "fork" and table.free_slots and (forked := table.fork(slot, rows[slot])) is not None:
            rows[forked[0]] = rows[slot]
        for pool, pages in zip(table.pools, table.tables, strict=True):
            held = set(pages[pages > 0].tolist())
            assert len(held) == pool.pages - pool.free
        whole = table.tables[0]
        for slot, length in rows.items():
            assert np.count_nonzero(whole[slot]) == -(-length // T)
