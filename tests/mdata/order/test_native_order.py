from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mdata.errors import UsageError, counted
from mdata.order.native_order import OrderKey, StreamOrder
from tests.helpers.examples import examples

KEY = OrderKey(1234, "corpus")
LENGTHS = st.integers(1, 40)
TOKENS = st.integers(1, 600)


def order(tokens, length, extra=True, *, key=KEY, shuffle=True):
    return StreamOrder(tokens, length, key=key, extra_token=extra, shuffle=shuffle)


@examples(150)
@given(TOKENS, LENGTHS, st.booleans(), st.integers(0, 5))
def test_an_epoch_reads_disjoint_runs_inside_the_range(tokens, length, extra, epoch):
    assume(tokens >= length + extra)
    native = order(tokens, length, extra)
    n = native.samples_per_epoch
    assert n == max(1, (tokens - extra - length + 1) // length)
    starts = np.sort(native.starts(np.arange(epoch * n, epoch * n + n)))
    assert (np.diff(starts) == length).all()
    assert 0 <= starts[0] < length
    assert starts[-1] + length + extra <= tokens


def test_offsets_and_orders_change_from_epoch_to_epoch_and_reach_every_offset():
    native = order(50, 4)
    n = native.samples_per_epoch
    epochs = native.starts(np.arange(200 * n)).reshape(200, n)
    assert {int(epoch.min()) for epoch in epochs} == {0, 1, 2, 3}
    assert len({tuple(epoch) for epoch in epochs}) == 200


@examples(100)
@given(TOKENS, LENGTHS, st.booleans(), st.booleans(), st.integers(0, 3))
def test_the_inverse_finds_every_token(tokens, length, extra, shuffle, epoch):
    assume(tokens >= (length if shuffle else 1) + extra)
    epoch = epoch if shuffle else 0
    native = order(tokens, length, extra, shuffle=shuffle)
    owner = np.full(tokens, -1)
    samples = np.arange(epoch * native.samples_per_epoch, (epoch + 1) * native.samples_per_epoch)
    for sample, start in zip(samples, native.starts(samples), strict=True):
        owner[start : min(start + length, tokens - extra)] = sample
    found = [native.sample_at(epoch, token) for token in range(tokens)]
    assert found == [None if sample == -1 else sample for sample in owner.tolist()]


@examples(100)
@given(TOKENS, LENGTHS, st.booleans())
def test_without_shuffling_one_pass_in_file_order_covers_every_input(tokens, length, extra):
    assume(tokens >= 1 + extra)
    native = order(tokens, length, extra, shuffle=False)
    assert native.num_samples == -(-(tokens - extra) // length)
    starts = native.starts(np.arange(native.num_samples))
    assert starts.tolist() == list(range(0, tokens - extra, length))


@pytest.mark.parametrize("bad", [[-1], [0, 3]])
def test_samples_outside_are_refused(bad):
    with pytest.raises(IndexError, match=r"of 3"):
        order(10, 4, shuffle=False).starts(bad)


def test_with_shuffling_there_is_no_end():
    native = order(10**9, 4096)
    assert native.num_samples is None
    assert 0 <= native.start(10**15) <= 10**9 - 4097


def test_other_seeds_and_corpora_give_other_orders_and_the_same_ones_the_same():
    def first(key):
        return tuple(order(10**6, 128, key=key).starts(np.arange(20)))

    keys = [OrderKey(1, "a"), OrderKey(2, "a"), OrderKey(1, "b")]
    assert len({first(key) for key in keys}) == 3
    assert first(keys[0]) == first(OrderKey(1, "a"))


@pytest.mark.parametrize(
    "tokens, length, extra, shuffle, least",
    [(128, 128, True, True, 129), (127, 128, False, True, 128), (1, 128, True, False, 2), (0, 4, False, False, 1)],
)
def test_too_few_tokens_are_refused_with_the_numbers(tokens, length, extra, shuffle, least):
    found = counted(tokens, "token")
    message = f"corpus corpus(.|\n)*{found} for sequence length {length}(.|\n)*at least {least}"
    with pytest.raises(UsageError, match=message):
        order(tokens, length, extra, shuffle=shuffle)
    order(least, length, extra, shuffle=shuffle)


def test_a_sequence_length_below_one_is_refused():
    with pytest.raises(UsageError, match=re.escape("the sequence length is not positive")):
        order(10, 0)


def test_known_answers():
    """These freeze version 1 of the native order."""
    assert order(1000003, 128, key=OrderKey(1234, "abc")).starts(np.arange(5)).tolist() == [
        210036,
        902900,
        40820,
        112244,
        153972,
    ]


def test_pickled_it_stays_the_same():
    native = order(10**6, 77, False, key=OrderKey(9, "x"))
    again = pickle.loads(pickle.dumps(native))
    assert (again.starts(np.arange(100)) == native.starts(np.arange(100))).all()
    assert (again.extra_token, again.shuffle) == (False, True)
