"""Whole samples for exact targets: what each component has been given at the end of each piece of a schedule.

A piece ends at sample ceil(E), E the exact sum of all targets there. Every component is given its target rounded down
or up, never less than before: a target that is reached must be given, and of the others those go up whose next whole
sample is due soonest, then those with the largest remainder, then the first. Dealing by due dates is what makes this
possible for every schedule (earliest due date first meets all dates that can be met, and exact shares meet them), so
every count is within one sample of its target at the end of every piece. Plain largest remainders do not do that:
what was rounded up once may leave too little for those who are due next. Slow twin: mdata/reference/phases.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdata.util.arrays import Int64s

Integers = NDArray[Any]  # object[components]: Python's integers of any size

_REMAINDER_BITS = 62  # remainders are compared in units of 2^-62


@dataclass(frozen=True, slots=True)
class Targets:
    """Exact targets at the ends of pieces.

    Args:
        num_pieces, num_components: how many.
        denominator: of all numerators. rows: a new walk over the pieces: object[components] numerators of the targets
            at the end of each, from the schedule's beginning.
    """

    num_pieces: int
    num_components: int
    denominator: int
    rows: Callable[[], Iterator[Integers]]


def apportion(targets: Targets) -> Int64s:
    """int64[pieces, components]: how many samples each component gives in each piece."""
    floors, remainders, ends = _rounded_down(targets)
    due = _next_due(floors)
    given = np.zeros((targets.num_pieces + 1, targets.num_components), np.int64)
    for piece, end in enumerate(ends):
        least = np.maximum(floors[piece], given[piece])
        short = end - int(least.sum())
        may = np.flatnonzero((given[piece] <= floors[piece]) & (remainders[piece] > 0))
        assert 0 <= short <= len(may), f"piece {piece}: {short} samples for {len(may)} components"
        first = np.lexsort((may, -remainders[piece, may], due[piece, may]))[:short]
        given[piece + 1] = least
        given[piece + 1, may[first]] += 1
    return np.diff(given, axis=0)


def _rounded_down(targets: Targets) -> tuple[Int64s, Int64s, list[int]]:
    """Whole samples of the targets, what is left of them in units of 2^-62 (above 0 if anything is), and the ends."""
    shape = (targets.num_pieces, targets.num_components)
    floors, remainders, ends = np.empty(shape, np.int64), np.empty(shape, np.int64), []
    for piece, row in enumerate(targets.rows()):
        whole = row // targets.denominator
        left = row - whole * targets.denominator
        floors[piece] = whole
        remainders[piece] = np.where(left > 0, np.maximum((left << _REMAINDER_BITS) // targets.denominator, 1), 0)
        ends.append(-(-int(row.sum()) // targets.denominator))
    return floors, remainders, ends


def _next_due(floors: Int64s) -> Int64s:
    """The piece by whose end one more whole sample than now is due; the number of pieces where it never is."""
    due = np.full_like(floors, len(floors))
    for piece in range(len(floors) - 2, -1, -1):
        due[piece] = np.where(floors[piece + 1] > floors[piece], piece + 1, due[piece + 1])
    return due
