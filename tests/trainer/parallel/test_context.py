"""The tokens of a row on the ranks that share it: each token once, and equal attention work on each rank."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.parallel.context import chunk_ends, columns_of


@given(st.integers(1, 64), st.integers(1, 9))
def test_ranks_tile_a_row_and_share_its_work(size, chunk):
    length = 2 * size * chunk
    held = [columns_of(length, rank=rank, size=size) for rank in range(size)]
    assert sorted(place for columns in held for place in columns) == list(range(length))
    assert len({sum(columns) for columns in held}) == 1, "scores per rank"
    for rank, columns in enumerate(held):
        ends = chunk_ends(length, rank=rank, size=size)
        assert columns == [place for end in ends for place in range(end - chunk, end)]


@given(st.integers(1, 64), st.integers(1, 5))
def test_first_chunks_and_then_second_ones_from_the_last_rank_on_are_the_row(size, chunk):
    """The order in which layers/context_rows.py joins them."""
    length = 2 * size * chunk
    held = [columns_of(length, rank=rank, size=size) for rank in range(size)]
    joined = [columns[:chunk] for columns in held] + [columns[chunk:] for columns in reversed(held)]
    assert [place for part in joined for place in part] == list(range(length))


def test_one_rank_holds_the_whole_row():
    assert columns_of(8, rank=0, size=1) == list(range(8))
    assert columns_of(8, rank=1, size=2) == [2, 3, 4, 5]
