"""One component after another: every sample once, found again, and counted at every prefix."""

from __future__ import annotations

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mdata.mixing.selection import Concatenation
from tests.helpers.examples import examples


@examples(100)
@given(sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6))
def test_every_sample_once_in_turn(sizes):
    both = pickle.loads(pickle.dumps(Concatenation(sizes)))
    expected = [(component, sample) for component, size in enumerate(sizes) for sample in range(size)]
    numbers = np.arange(sum(sizes))
    components, inside = both.locate(numbers)
    assert list(zip(components.tolist(), inside.tolist(), strict=True)) == expected
    assert both.inverse(components, inside).tolist() == numbers.tolist()
    assert both.num_samples == len(expected)
    for prefix in range(len(expected) + 1):
        counts = np.bincount(components[:prefix], minlength=len(sizes)).tolist()
        assert list(both.counts(prefix)) == counts


def test_sizes_of_64_bits():
    both = Concatenation([2**40, 2**61])
    assert [array.tolist() for array in both.locate([2**40 - 1, 2**40, 2**61])] == [
        [0, 1, 1],
        [2**40 - 1, 0, 2**61 - 2**40],
    ]
    assert both.num_samples == 2**61 + 2**40
