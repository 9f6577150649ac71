"""A blend of several phases: one phase after another, each with a tree of its own weights.

A segment is a phase (a ramp is many segments): integer weights and a length. If the weights sum to the length, as in
every bounded phase that ran to its end, the counts at its end are exactly the weights. A component continues where the
previous segment left it: the cursors at the start of segment j are row j of one table, which is computed from the blend
and never stored by a run. `mdata.mixing.resolve` decides the segments. Slow twin: tests/reference/phases.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mdata.mixing.native_blend import NativeBlend
from mdata.util.arrays import Int64s
from mdata.util.pickling import PickledByArguments

# A tree is built when one of its samples is first read; this many leaves are cached (64 bytes each).
_CACHED_LEAVES = 1 << 20


class Segment(NamedTuple):
    """Weights int64[components] (0: not read) and a length in samples of their tree (None: endless)."""

    weights: Int64s
    length: int | None


class PhasedBlend(PickledByArguments):
    """Global sample number <-> (component, sample inside it) over segments; can be pickled.

    Args:
        segments: at least one; all but the last have a length above 0; each has a positive weight.
        end: number of samples, if fewer than the lengths add up to (a cap is reached).

    Attributes:
        segments, starts: the segments and their first samples. cursors: int64[segments + 1, components], how many
            samples each component has given at each start; the last row is unused if the blend is endless.
    """

    def __init__(self, segments: Sequence[Segment], end: int | None = None) -> None:
        self.segments = tuple(segments)
        lengths = [segment.length for segment in self.segments]
        assert None not in lengths[:-1], "only the last segment may be without end"
        self.starts = np.cumsum([0, *(length or 0 for length in lengths)], dtype=np.int64)
        self._end = end if end is not None or lengths[-1] is None else int(self.starts[-1])
        size = max(2, _CACHED_LEAVES // len(self.segments[0].weights))
        self._tree = lru_cache(maxsize=size)(self._make_tree)
        self.cursors = np.zeros((len(self.segments) + 1, len(self.segments[0].weights)), np.int64)
        for number, segment in enumerate(self.segments):
            self.cursors[number + 1] = self.cursors[number] + self._given(number, segment.length or 0)

    @property
    def num_samples(self) -> int | None:
        """Number of samples; None if endless."""
        return self._end

    def locate(self, samples: ArrayLike) -> tuple[Int64s, Int64s]:
        """Integer[k] global samples -> (component, sample inside the component), int64[k] each.

        Raises:
            IndexError: a number below 0 or past the end.
        """
        numbers = np.ascontiguousarray(samples, np.int64)
        if numbers.size and (numbers.min() < 0 or (self._end is not None and numbers.max() >= self._end)):
            raise IndexError(f"samples {numbers.min()} to {numbers.max()} of a blend of {self._end}")
        components, inside = np.empty_like(numbers), np.empty_like(numbers)
        for number, places in _grouped(self._segments_of(numbers)):
            used, tree = self._tree(number)
            components_of_tree, of_tree = tree.locate(numbers[places] - self.starts[number])
            components[places] = used[components_of_tree]
            inside[places] = of_tree + self.cursors[number, components[places]]
        return components, inside

    def inverse(self, components: ArrayLike, samples: ArrayLike) -> Int64s:
        """Integer[k] components and integer[k] of their samples -> int64[k] global samples.

        Raises:
            IndexError: no such component, or a sample that it never gives.
        """
        of, inside = np.ascontiguousarray(components, np.int64), np.ascontiguousarray(samples, np.int64)
        if of.shape != inside.shape:
            raise ValueError(f"{of.shape} components and {inside.shape} samples differ in size")
        if of.size and (of.min() < 0 or of.max() >= self.cursors.shape[1] or inside.min() < 0):
            raise IndexError("no such component, or a sample below 0")
        numbers = np.empty_like(inside)
        for number, places in _grouped(self._segments_giving(of, inside)):
            used, tree = self._tree(number)
            local = np.searchsorted(used, of[places])
            if (used[np.minimum(local, len(used) - 1)] != of[places]).any():
                raise IndexError("the component has fewer samples than requested")
            left = inside[places] - self.cursors[number, of[places]]
            numbers[places] = tree.inverse(local, left) + self.starts[number]
        if self._end is not None and numbers.size and numbers.max() >= self._end:
            raise IndexError("the component has fewer samples than requested")
        return numbers

    def sample_of(self, component: int, sample: int) -> int | None:
        """The global number of a component's sample; None if it never comes, or comes after 2^62."""
        try:
            return int(self.inverse([component], [sample])[0])
        except (IndexError, OverflowError):
            return None

    def counts(self, num_samples: int) -> tuple[int, ...]:
        """How many of the first `num_samples` global samples each component gives.

        Raises:
            IndexError: more than the blend has.
        """
        if num_samples < 0 or (self._end is not None and num_samples > self._end):
            raise IndexError(f"{num_samples} samples of a blend of {self._end}")
        number = int(self._segments_of(np.array([num_samples]))[0])
        in_segment = self._given(number, num_samples - int(self.starts[number]))
        return tuple((self.cursors[number] + in_segment).tolist())

    def changes(self, least: float) -> tuple[int, ...]:
        """First samples of the stretches whose shares differ by at least `least` from those where the one before began.

        The first is 0. The difference of two mixtures is the share of samples that one reads from other components;
        shares are rounded, so 1e-9 less is enough.
        """
        starts, before = [], None
        for start, segment in zip(self.starts.tolist(), self.segments, strict=False):
            shares = segment.weights / segment.weights.sum()
            if before is None or np.abs(shares - before).sum() / 2 >= least - 1e-9:
                starts.append(start)
                before = shares
        return tuple(starts)

    def _segments_of(self, numbers: Int64s) -> Int64s:
        segments = np.searchsorted(self.starts[1:-1], numbers, side="right")
        return np.asarray(segments, np.int64)

    def _segments_giving(self, components: Int64s, inside: Int64s) -> Int64s:
        """The last segment before which its component had given at most `inside` samples, by bisection of a column."""
        low, high = np.zeros_like(inside), np.full_like(inside, len(self.segments))
        while (high - low > 1).any():
            middle = (low + high) // 2
            enough = self.cursors[middle, components] <= inside
            low, high = np.where(enough, middle, low), np.where(enough, high, middle)
        return low

    def _given(self, number: int, count: int) -> Int64s:
        """int64[components]: how many of the first `count` samples of a segment each gives."""
        weights, counts = self.segments[number].weights, np.zeros(self.cursors.shape[1], np.int64)
        if count == int(weights.sum()):
            return weights  # the tree's whole sum, known without building the tree
        if count:
            used, tree = self._tree(number)
            counts[used] = tree.counts(count)
        return counts

    def _make_tree(self, number: int) -> tuple[Int64s, NativeBlend]:
        weights = self.segments[number].weights
        used = np.flatnonzero(weights)
        return used, NativeBlend(weights[used].tolist())


def _grouped(numbers: Int64s) -> list[tuple[int, NDArray[np.intp] | slice]]:
    """(value, its positions) for each value; in the usual case of one value, all positions at once."""
    if not numbers.size:
        return []
    if numbers.min() == numbers.max():
        return [(int(numbers.flat[0]), slice(None))]
    order = np.argsort(numbers, kind="stable")
    values, firsts = np.unique(numbers[order], return_index=True)
    return list(zip(values.tolist(), np.split(order, firsts[1:]), strict=True))
