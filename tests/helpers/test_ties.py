"""The counter of ties: near choices may differ, but rarely; others may not."""

from __future__ import annotations

import pytest

from tests.helpers.ties import Ties


def test_a_tie_ends_the_comparison_of_a_row_and_is_counted():
    ties = Ties()
    assert ties.common([1, 2, 3], [1, 2, 3], gap=lambda place: 1.0, row="a") == 3
    assert ties.common([1, 5, 9], [1, 2, 3, 4], gap=lambda place: {1: 1e-6}[place], row="b") == 1
    assert (ties.tokens, ties.ties) == (7, 1)
    with pytest.raises(AssertionError, match="1 ties among 7 tokens"):
        ties.check()
    ties.common([0] * 993, [0] * 993, gap=lambda place: 1.0, row="c")
    ties.check()


def test_another_token_without_a_tie_fails():
    for found in ([1, 3], [1], [1, 2, 3]):
        with pytest.raises(AssertionError, match=r"^row 7: "):
            Ties().common(found, [1, 2], gap=lambda place: 1e-4, row="row 7")
