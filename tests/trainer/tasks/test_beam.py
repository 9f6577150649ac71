"""Beam search against a search of every text, and against the rule written plainly."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mdata import UsageError
from trainer.tasks.beam import Beams, Finished

VOCABULARY, END = 4, 3


def table(seed: int) -> dict[tuple[int, ...], list[float]]:
    """Log probabilities after every text of up to four tokens."""
    draws = torch.randn(5000, VOCABULARY, generator=torch.Generator().manual_seed(seed)).log_softmax(-1).tolist()
    texts = [row for n in range(5) for row in itertools.product(range(VOCABULARY), repeat=n)]
    return dict(zip(texts, draws, strict=False))


def search(after: dict[tuple[int, ...], list[float]], **options: object) -> Beams:
    beams = Beams(max_tokens=4, ends=frozenset({END}), **options)  # type: ignore[arg-type]
    while not beams.done:
        before = beams.rows
        beams.advance(torch.tensor([after[row] for row in before], dtype=torch.float64))
        assert all(row[:-1] == before[parent] for row, parent in zip(beams.rows, beams.parents, strict=True))
    return beams


def slow_search(
    after: dict[tuple[int, ...], list[float]], width: int, penalty: float, early: bool | str
) -> list[tuple[tuple[int, ...], float]]:
    """The rule as a loop over lists of (sum, text)."""
    rows, ended = [(0.0, ())], []

    def best_of(texts: list[tuple[float, tuple[int, ...]]]) -> list[tuple[float, tuple[int, ...]]]:
        return sorted(texts, key=lambda one: -one[0])[:width]

    for length in range(1, 5):
        every = [(total + after[row][t], row, t) for total, row in rows for t in range(VOCABULARY)]
        best = sorted(every, key=lambda one: -one[0])[: 2 * width]
        rows = []
        for rank, (total, row, token) in enumerate(best):
            if token != END:
                rows.append((total, (*row, token)))
            elif rank < width:
                ended = best_of([*ended, (total / length**penalty, row)])
            if len(rows) == width:
                break
        if length == 4:
            ended = best_of(ended + [(total / length**penalty, row) for total, row in rows])
        if len(ended) == width and early is True:
            break
        farthest = 4 if early == "never" and penalty > 0 else length
        if len(ended) == width and ended[-1][0] >= best[0][0] / farthest**penalty:
            break
    return [(row, score) for score, row in ended]


@settings(deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    st.sampled_from([True, False, "never"]),
)
def test_the_search_equals_its_twin(seed, width, penalty, early):
    after = table(seed)
    beams = search(after, width=width, length_penalty=penalty, early_stopping=early)
    expected = slow_search(after, width, penalty, early)
    assert [beam.tokens for beam in beams.results(width)] == [row for row, _ in expected]
    assert [beam.score for beam in beams.results(width)] == pytest.approx([score for _, score in expected])


def test_a_wide_search_finds_the_best_text_of_all():
    after = table(7)
    texts = [row for n in range(5) for row in itertools.product(range(END), repeat=n)]

    def total(row: tuple[int, ...]) -> float:
        return sum(after[row[:i]][token] for i, token in enumerate(row)) + (after[row][END] if len(row) < 4 else 0.0)

    (best,) = search(after, width=81, length_penalty=0.0).results(1)
    assert best.tokens == max(texts, key=total) and best.total == pytest.approx(max(map(total, texts)))


def test_tokens_that_cannot_come_are_no_candidates():
    beams = Beams(width=3, max_tokens=2, ends=frozenset())
    beams.advance(torch.tensor([[0.0, -math.inf, -math.inf]]))
    assert beams.rows == [(0,)]
    beams.advance(torch.tensor([[-1.0, -0.5, -math.inf]]))
    assert [beam.tokens for beam in beams.results(3)] == [(0, 1), (0, 0)]


def test_the_worst_leaves_when_a_better_text_comes():
    finished = Finished(2, length_penalty=1.0)
    for tokens, total in (((1,), -4.0), ((2,), -2.0), ((3,), -3.0), ((4,), -9.0)):
        finished.add(tokens, total, length=2, stopped=True)
    assert [beam.tokens for beam in finished.ranked()] == [(2,), (3,)]
    assert finished.is_done(-4.0, length=2) and not finished.is_done(-2.9, length=2)
    assert not Finished(2).is_done(-99.0, length=1)


def test_numbers_out_of_range_are_refused():
    with pytest.raises(UsageError, match="beam_width=0"):
        Beams(0, 4)
    with pytest.raises(UsageError, match="max_tokens=0"):
        Beams(1, 0)
    for penalty in (math.nan, math.inf, 33.0, -1e300):  # 2 ** 1e300 overflows, total / 2 ** -1e300 divides by 0
        with pytest.raises(UsageError, match=r"length_penalty=.* is out of range"):
            Beams(1, 1, length_penalty=penalty)
