"""Whole samples for exact targets: within one sample at every end, never decreasing, equal to the twin."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mdata.mixing.rounding import Targets, round_targets
from tests.helpers.examples import examples
from tests.reference import phases as twin

SHARES = st.integers(0, 5) | st.integers(0, 10**6) | st.integers(0, 2**70)


@st.composite
def increments(draw):
    """What each component is to get in each piece."""
    number, pieces = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    rows = []
    for _ in range(pieces):
        weights = draw(st.lists(SHARES, min_size=number, max_size=number).filter(any))
        length = draw(st.fractions(0, 20, max_denominator=7))
        rows.append([length * weight / sum(weights) for weight in weights])
    return rows


def given_at(rows: list[list[Fraction]]) -> tuple[list[list[Fraction]], list[list[int]]]:
    """(targets at every end, samples given at every end)."""
    targets = [[sum(column[: i + 1], Fraction(0)) for column in zip(*rows, strict=True)] for i in range(len(rows))]
    denominator = math.lcm(*(value.denominator for row in targets for value in row))
    numerators = [np.array([int(value * denominator) for value in row], object) for row in targets]
    counts = round_targets(Targets(len(rows), len(rows[0]), denominator, lambda: iter(numerators)))
    assert (counts >= 0).all()
    return targets, np.cumsum(counts, axis=0).tolist()


@examples(80)
@given(increments())
def test_within_one_sample_and_equal_to_the_twin(rows):
    targets, given_ = given_at(rows)
    for target, have in zip(targets, given_, strict=True):
        assert sum(have) == math.ceil(sum(target))
        for exact, count in zip(target, have, strict=True):
            assert math.floor(exact) <= count <= math.ceil(exact)
    assert given_ == twin.round_targets(targets)


def test_largest_remainders_alone_would_not_do():
    """Ten are rounded up by 0.9 and rest; ninety are then due 0.9999 + 0.0112 each, and 82 samples would not reach."""
    first = [Fraction(1, 10)] * 10 + [Fraction(999, 10_000)] * 90 + [10 - 1 - Fraction(999 * 90, 10_000)]
    second = [Fraction(0)] * 10 + [Fraction(82, 90)] * 90 + [Fraction(0)]
    targets, given_ = given_at([first, second])
    for target, have in zip(targets, given_, strict=True):
        assert all(abs(exact - count) < 1 for exact, count in zip(target, have, strict=True))
    assert sum(given_[0][:10]) == 0


def test_remainders_that_differ_by_less_than_two_to_the_minus_62_are_equal():
    small = Fraction(1, 2**70)
    assert given_at([[Fraction(1, 3), Fraction(1, 3) + small, Fraction(1, 3) - small]])[1] == [[1, 0, 0]]
    more = Fraction(1, 2**60)
    assert given_at([[Fraction(1, 3), Fraction(1, 3) + more, Fraction(1, 3) - more]])[1] == [[0, 1, 0]]


def test_one_piece_is_plain_largest_remainder():
    assert given_at([[Fraction(5, 2), Fraction(13, 10), Fraction(6, 5)]])[1] == [[3, 1, 1]]
    assert given_at([[Fraction(1, 2)] * 2])[1] == [[1, 0]]
