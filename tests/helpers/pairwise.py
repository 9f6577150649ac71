"""Rows in which every two values of different options meet: a few dozen in place of thousands."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Mapping, Sequence

Row = dict[str, Hashable]
TRIES = 40  # rows that are drawn for each that is taken


def pairwise(options: Mapping[str, Sequence[Hashable]], *, valid: Callable[[Row], bool], seed: int) -> list[Row]:
    """A seeded cover: each pair of values that occurs in a valid row at all is in one of the result.

    Args:
        options: name -> values. valid: whether a row can be.
    """
    chance, names = random.Random(seed), list(options)
    rows = [dict(zip(names, values, strict=True)) for values in itertools.product(*options.values())]
    possible = [row for row in rows if valid(row)]
    left = {pair for row in possible for pair in _pairs(row)}
    found: list[Row] = []
    while left:
        first = min(left, key=repr)  # so that each row covers something new
        fit = [row for row in possible if first in _pairs(row)]
        drawn = chance.sample(fit, min(TRIES, len(fit)))
        found.append(max(drawn, key=lambda row: len(left & _pairs(row))))
        left -= _pairs(found[-1])
    return found


def _pairs(row: Row) -> set[frozenset[tuple[str, Hashable]]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
