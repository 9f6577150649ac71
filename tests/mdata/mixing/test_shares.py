from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import UsageError
from mdata.mixing.shares import LARGEST_SUM, as_text, exact, integer_weights

POSITIVE = st.fractions(min_value=Fraction(1, 10**6), max_value=10**6, max_denominator=10**6)


@pytest.mark.parametrize(
    "shares, weights",
    [
        (["0.7", "0.3"], (7, 3)),
        (["70", "30"], (7, 3)),
        ([7, 3], (7, 3)),
        ([Fraction(7, 30), Fraction(1, 10)], (7, 3)),
        (["1/3", "2/3"], (1, 2)),
        (["1e-3", "1"], (1, 1000)),
        (["1_0", "5"], (2, 1)),
        (["0.1"], (1,)),
        (["0.1", "0.2", "0.7"], (1, 2, 7)),
        ([1 << 61, 1 << 61], (1, 1)),
    ],
)
def test_shares_become_exact_integers(shares, weights):
    assert integer_weights(shares) == weights


@pytest.mark.parametrize("text", ["0.7", "1/3", "100", "0.000001", "0", "1/34359738368"])
def test_a_share_is_written_as_people_would(text):
    assert as_text(Fraction(text)) == text


@given(st.fractions(min_value=0))
def test_a_written_share_is_the_share(share):
    assert exact(as_text(share)) == share


@given(st.lists(POSITIVE, min_size=1, max_size=4))
def test_ratios_are_kept_exactly_where_they_fit(shares):
    weights = integer_weights(shares)
    assert sum(weights) <= LARGEST_SUM
    scale = math.lcm(*(share.denominator for share in shares))
    common = math.gcd(*(int(share * scale) for share in shares))
    if sum(shares) * scale / common <= LARGEST_SUM:
        assert all(w * shares[0] == weights[0] * s for w, s in zip(weights, shares, strict=True))


@given(st.lists(st.integers(10**20, 10**22), min_size=2, max_size=8))
def test_larger_sums_are_rounded_by_largest_remainder(shares):
    weights = integer_weights(shares)
    common = math.gcd(*shares)
    if sum(shares) // common <= LARGEST_SUM:
        assert weights == tuple(share // common for share in shares)
        return
    assert sum(weights) == LARGEST_SUM
    exact = [Fraction(share * LARGEST_SUM, sum(shares)) for share in shares]
    assert all(abs(w - e) < 1 for w, e in zip(weights, exact, strict=True))
    up = [e - math.floor(e) for w, e in zip(weights, exact, strict=True) if w > e]
    down = [e - math.floor(e) for w, e in zip(weights, exact, strict=True) if w < e]
    assert not up or not down or min(up) >= max(down)


def test_equal_remainders_go_to_the_first():
    assert integer_weights([2**70, 2**70, 2**70]) == (1, 1, 1)
    third = LARGEST_SUM // 3
    assert integer_weights([3 * 2**70 + 1, 3 * 2**70, 3 * 2**70]) == (third + 1, third, third)


@pytest.mark.parametrize("bad", ["0", 0, "-1", -1, "nan", "inf", "x", "", "1/0", "1e", "1e" + "\u0669" * 8, 0.5, True])
def test_what_is_no_positive_number_is_refused_by_name(bad):
    with pytest.raises(UsageError, match=r"the share of wiki is not a positive number"):
        integer_weights(["1", bad], ["books", "wiki"])


@pytest.mark.parametrize("wide", ["1e999", "1e500", "1e-99999999999", "1" * 5000, "0." + "1" * 5000, "1e" + "9" * 5000])
def test_a_share_that_is_too_long_is_not_called_no_number(wide):
    with pytest.raises(UsageError, match=r"the share of wiki has too many digits(.|\n)*at most 30 digits on each side"):
        integer_weights(["1", wide], ["books", "wiki"])


def test_a_share_too_small_to_be_a_weight_is_refused_by_name():
    with pytest.raises(UsageError, match=r"share of wiki is too small(.|\n)*1e-30"):
        integer_weights(["1", "1e-30"], ["books", "wiki"])
