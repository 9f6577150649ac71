from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import _core
from mdata.order.permutation import Permutation, shuffled_range
from mdata.util.random_keys import Key
from tests.helpers.examples import examples
from tests.reference import permutation as twin

WORDS = st.integers(0, 2**32 - 1)
KEYS = st.builds(Key, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.just(0))
KEY = Key(0x0123456789ABCDEF, 0xFEDCBA9876543210, 0)


@given(st.tuples(WORDS, WORDS, WORDS, WORDS), st.tuples(WORDS, WORDS))
def test_philox_equals_its_twin(counter, key):
    assert tuple(_core.philox4x32(counter, key)) == twin.philox4x32(counter, key)


def test_known_answers():
    """These freeze version 1 of the native order; tests/cpp/test_permutation.cpp has the same."""
    assert Permutation(8, KEY).forward(range(8)).tolist() == [2, 6, 4, 1, 7, 3, 5, 0]
    assert Permutation(4096, KEY).forward([0]) == 2622
    assert Permutation(4097, KEY).forward([0]) == 201
    assert Permutation(10**12, KEY).forward([1]) == 321503437300


@examples(30)
@given(st.integers(1, 4096), KEYS)
def test_tables_equal_the_twin(n, key):
    assert Permutation(n, key).forward(range(n)).tolist() == twin.permutation(n, (key.low, key.high))


@examples(60)
@given(st.integers(4097, 2**63), KEYS, st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5))
def test_networks_equal_the_twin_and_invert(n, key, places):
    places = [place % n for place in places]
    values = Permutation(n, key).forward(places)
    assert values.tolist() == [twin.forward(place, n, key=(key.low, key.high)) for place in places]
    assert Permutation(n, key).inverse(values).tolist() == places


@examples(20)
@given(st.integers(-(2**62), 2**62), st.integers(1, 300) | st.sampled_from([4096, 4097]), KEYS)
def test_shuffled_ranges_equal_the_twin(first, n, key):
    expected = twin.shuffled_range(first, n, key=(key.low, key.high))
    assert shuffled_range(first, n, key=key).tolist() == expected


@examples(40)
@given(st.integers(1, 9000), KEYS)
def test_every_value_comes_once(n, key):
    permutation = Permutation(n, key)
    values = permutation.forward(np.arange(n))
    assert (np.sort(values) == np.arange(n)).all()
    assert (permutation.inverse(values) == np.arange(n)).all()


@pytest.mark.parametrize("n", [10, 5000])
@pytest.mark.parametrize("bad", [-1, "n"])
def test_entries_outside_are_refused(n, bad):
    entry = [0, n if bad == "n" else bad]
    with pytest.raises(IndexError, match=r"\[0, n\)"):
        Permutation(n, KEY).forward(entry)
    with pytest.raises(IndexError, match=r"\[0, n\)"):
        Permutation(n, KEY).inverse(entry)


def test_sizes_outside_are_refused():
    for n in (0, 2**63 + 1):
        with pytest.raises(ValueError, match="n must be"):
            Permutation(n, KEY)


@pytest.mark.parametrize("n", [100, 10**9])
def test_pickled_it_stays_the_same(n):
    permutation = Permutation(n, KEY)
    again = pickle.loads(pickle.dumps(permutation))
    assert again.n == n
    assert (again.forward(range(50)) == permutation.forward(range(50))).all()
