"""Packing: equal to the twin, every token once, and how full the rows are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata._core import pack_documents
from tests.helpers.examples import examples
from tests.reference.packing import pack


def rows_of(lengths, row_length, window, *more):
    ends, documents, offsets, counts = pack_documents(np.array(lengths, np.int64), row_length, window, *more)
    pieces = list(zip(documents.tolist(), offsets.tolist(), counts.tolist(), strict=True))
    return [pieces[start:end] for start, end in zip([0, *ends.tolist()], ends.tolist(), strict=False)]


@examples(300)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=40),
    row_length=st.integers(1, 20),
    window=st.integers(1, 50),
    data=st.data(),
)
def test_equal_to_the_twin(lengths, row_length, window, data):
    overlap, least = data.draw(st.integers(0, row_length - 1)), data.draw(st.integers(1, row_length))
    expected = pack(lengths, row_length, window=window, overlap=overlap, least=least)
    assert rows_of(lengths, row_length, window, overlap, least) == expected


def test_rows_of_many_documents_are_full():
    lengths = np.random.default_rng(1).lognormal(6, 1.2, 20_000).astype(np.int64)
    ends, _, _, counts = pack_documents(lengths, 2048, 1 << 16)
    assert counts.sum() == lengths.sum()
    # No packing needs fewer rows than the tokens fill; this one needs hardly more.
    assert len(ends) * 2048 < 1.001 * lengths.sum() + 2048


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (([1], 0, 1), "row length"),
        (([1], (1 << 26) + 1, 1), "row length"),
        (([1], 4, 0), "window"),
        (([-1], 4, 1), "negative"),
        (([1], 4, 1, 4), "overlap"),
        (([1], 4, 1, 0, 5), "piece"),
    ],
)
def test_what_makes_no_rows_is_refused(bad, told):
    with pytest.raises(ValueError, match=told):
        rows_of(*bad)
