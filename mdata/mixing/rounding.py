"""Rounds exact targets to whole samples: the count of each component at the end of each segment of a schedule.

A segment ends at sample ceil(E), E the exact sum of all targets there. Every component gets its target rounded down or
up, never less than before. A target that is a whole number must be met; of the others, those are rounded up whose next
whole sample is due soonest, then those with the largest remainder, then the first. Assigning by due dates makes this
possible for every schedule (earliest due date first meets all dates that can be met, and exact shares meet them), so
every count is within one sample of its target at the end of every segment. Plain largest remainders do not achieve
that: rounding one component up may leave too little for those that are due next. Slow twin: tests/reference/phases.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdata.util.arrays import Int64s

Integers = NDArray[Any]  # object[components]: Python integers of any size

_REMAINDER_BITS = 62  # remainders are compared in units of 2^-62


@dataclass(frozen=True, slots=True)
class Targets:
    """Exact targets at the ends of segments.

    Args:
        num_segments, num_components: how many.
        denominator: of all numerators. rows: starts a new pass over the segments: object[components], numerators of the
            targets at the end of each segment, counted from the schedule's beginning.
    """

    num_segments: int
    num_components: int
    denominator: int
    rows: Callable[[], Iterator[Integers]]


def round_targets(targets: Targets) -> Int64s:
    """int64[segments, components]: how many samples each component gives in each segment."""
    floors, remainders, ends = _rounded_down(targets)
    due = _next_due(floors)
    given = np.zeros((targets.num_segments + 1, targets.num_components), np.int64)
    for segment, end in enumerate(ends):
        least = np.maximum(floors[segment], given[segment])
        short = end - int(least.sum())
        may = np.flatnonzero((given[segment] <= floors[segment]) & (remainders[segment] > 0))
        assert 0 <= short <= len(may), f"segment {segment}: {short} samples for {len(may)} components"
        first = np.lexsort((may, -remainders[segment, may], due[segment, may]))[:short]
        given[segment + 1] = least
        given[segment + 1, may[first]] += 1
    return np.diff(given, axis=0)


def _rounded_down(targets: Targets) -> tuple[Int64s, Int64s, list[int]]:
    """The targets rounded down, their remainders in units of 2^-62 (above 0 unless exactly 0), and the segment ends."""
    shape = (targets.num_segments, targets.num_components)
    floors, remainders, ends = np.empty(shape, np.int64), np.empty(shape, np.int64), []
    for segment, row in enumerate(targets.rows()):
        whole = row // targets.denominator
        left = row - whole * targets.denominator
        floors[segment] = whole
        remainders[segment] = np.where(left > 0, np.maximum((left << _REMAINDER_BITS) // targets.denominator, 1), 0)
        ends.append(-(-int(row.sum()) // targets.denominator))
    return floors, remainders, ends


def _next_due(floors: Int64s) -> Int64s:
    """The segment by whose end one more whole sample is due; the number of segments if it never is."""
    due = np.full_like(floors, len(floors))
    for segment in range(len(floors) - 2, -1, -1):
        due[segment] = np.where(floors[segment + 1] > floors[segment], segment + 1, due[segment + 1])
    return due
