"""How likely a table of counts is by chance: Pearson's chi-square, with its tail computed.

Tests with fixed keys compare with `RARE`: a rarer result counts as a bug, and because the keys are fixed the result
never changes.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

RARE = 1e-6
_LEAST = 5  # expected in a cell, the usual rule


def tail(square: float, df: int) -> float:
    """P(X > square) for a chi-square of df degrees: Abramowitz and Stegun, 26.4.4 (odd df) and 26.4.5 (even df)."""
    half = square / 2
    if half == 0:
        return 1.0
    first = math.erfc(math.sqrt(half)) if df % 2 else math.exp(-half)
    terms = (a / 2 * math.log(half) - half - math.lgamma(a / 2 + 1) for a in range(2 - df % 2, df, 2))
    return first + math.fsum(math.exp(term) for term in terms)


def normal_tail(z: float) -> float:
    """P(|Z| > |z|) for a standard normal deviate."""
    return math.erfc(abs(z) / math.sqrt(2))


def of_counts(seen: ArrayLike, chances: ArrayLike | None = None) -> float:
    """The probability of counts that differ at least this much, for equal or given chances; rare cells are merged."""
    counts = np.asarray(seen, np.float64).ravel()
    shares = np.full(len(counts), 1 / len(counts)) if chances is None else np.asarray(chances, np.float64)
    expected = counts.sum() * shares
    if (rare := expected < _LEAST).any():
        counts, expected = (np.append(cells[~rare], cells[rare].sum()) for cells in (counts, expected))
    assert expected.min() >= _LEAST, f"{expected.min():.1f} expected in a cell: too few for a chi-square"
    return tail(float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1)


def of_values(values: ArrayLike, num: int) -> float:
    """The same for how often each number of [0, num) occurs."""
    return of_counts(np.bincount(np.asarray(values, np.int64).ravel(), minlength=num))
