"""Pairwise test rows: every pair of values of different options occurs, in a few dozen rows instead of thousands."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

Row = dict[str, Hashable]
Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]
TRIES = 40  # rows that are drawn for each that is taken


def pairwise(options: Mapping[str, Sequence[Hashable]], *, valid: Callable[[Row], bool], seed: int) -> list[Row]:
    """A seeded cover: each pair of values that occurs in any valid row is in one row of the result.

    Args:
        options: name -> values. valid: whether a row can be.
    """
    chance, names = random.Random(seed), list(options)
    rows = [dict(zip(names, values, strict=True)) for values in itertools.product(*options.values())]
    possible = [row for row in rows if valid(row)]
    columns = {name: [row[name] for row in possible] for name in names}
    # A dictionary, because a set of texts has another order in each process.
    left: dict[Pair, None] = {}
    for one, other in itertools.combinations(names, 2):
        met = dict.fromkeys(zip(columns[one], columns[other], strict=True))
        left |= {((one, value), (other, second)): None for value, second in met}
    found: list[Row] = []
    while left:
        (one, value), (other, second) = next(iter(left))  # so that each row covers something new
        pairs = zip(possible, columns[one], columns[other], strict=True)
        fit = [row for row, a, b in pairs if a == value and b == second]
        drawn = chance.sample(fit, min(TRIES, len(fit)))
        found.append(max(drawn, key=lambda row: sum(pair in left for pair in _pairs(row))))
        for pair in _pairs(found[-1]):
            left.pop(pair, None)
    return found


def _pairs(row: Row) -> Iterable[Pair]:
    return itertools.combinations(row.items(), 2)
