"""Twin of phased_blend.py and of the rounding in resolve.py: phases one after another, whole samples for exact targets.

A segment is (weights, length), with 0 for a component that is not read and None for an endless length. Targets are rows
of fractions, one row for the end of each segment, counted from the beginning; remainders are compared in units of
2^-62.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from tests.reference import blend

Segment = tuple[Sequence[int], int | None]


def round_targets(targets: Sequence[Sequence[Fraction]]) -> list[list[int]]:
    """Return what each component has been given at the end of each segment: sample by sample, what is due first."""
    given, rows = [0] * len(targets[0]), []
    for segment, row in enumerate(targets):

        def urgency(i: int, segment: int = segment, row: Sequence[Fraction] = row) -> tuple[int, int, int]:
            later = range(segment, len(targets))
            due = next((d for d in later if targets[d][i] >= given[i] + 1), len(targets))
            return due, -max(1, math.floor((row[i] - given[i]) * 2**62)), i

        while sum(given) < math.ceil(sum(row)):
            begun = [i for i in range(len(row)) if row[i] > given[i]]
            given[min(begun, key=urgency)] += 1
        rows.append(list(given))
    return rows


def counts(segments: Sequence[Segment], k: int) -> list[int]:
    """Return how many of the first k samples each component gives."""
    given = [0] * len(segments[0][0])
    for weights, length in segments:
        used = [i for i, weight in enumerate(weights) if weight]
        here = k if length is None else min(k, length)
        for leaf, count in blend.counts(blend.build([weights[i] for i in used]), here).items():
            given[used[leaf]] += count
        k -= here
    return given


def locate(segments: Sequence[Segment], k: int) -> tuple[int, int]:
    """Return (component, sample inside it) of the blend's sample k."""
    before, after = counts(segments, k), counts(segments, k + 1)
    component = next(i for i in range(len(before)) if after[i] > before[i])
    return component, before[component]
