"""The runs of the flat buffers that a rank holds or owns, and where they lie in a tensor of the optimizer's state.

Pure. A run can begin and end anywhere in a parameter, so it is cut into logical rectangles for checkpoints, and into
segments of equal rules for the update.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trainer.optim.layout import Bucket, BufferLayout, RuleRange, Slot
from trainer.parallel.params import ParamSpec, Slice, slices


class OwnedRun(NamedTuple):
    """Elements [start, stop) of the buffer that a rank owns; they begin at `first` in its optimizer's state."""

    start: int
    stop: int
    first: int
    bucket: Bucket


class OwnedSlice(NamedTuple):
    """A logical rectangle whose elements begin at `first` in the optimizer's state."""

    spec: ParamSpec
    part: Slice
    first: int


class OwnedParameter(NamedTuple):
    """Elements [start, stop) of a parameter; they begin at `first` in the optimizer's state."""

    slot: Slot
    start: int
    stop: int
    first: int


@dataclass(frozen=True, slots=True)
class Ownership:
    """The runs of the buffers that one rank owns, or those of some of its parameters, in the order of a state."""

    runs: tuple[OwnedRun, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return sum(run.stop - run.start for run in self.runs)

    def only(self, *, matrix: bool) -> Ownership:
        """Only the matrices of blocks, or only the rest, as a separate state."""
        runs, first = [], 0
        for run, segment in self.segments():
            if segment.rules.matrix == matrix:
                runs.append(OwnedRun(segment.start, segment.stop, first, run.bucket))
                first += segment.stop - segment.start
        return Ownership(tuple(runs))

    def of(self, *, frozen: bool) -> Ownership:
        """Only the runs of frozen parameters, or only those of others, with their positions in this state."""
        return Ownership(tuple(run for run in self.runs if run.bucket.frozen == frozen))

    def within(self, others: Ownership) -> Ownership:
        """The parts that are also in another ownership, with their positions in this one's state."""
        runs = []
        for run, other in itertools.product(self.runs, others.runs):
            start, stop = max(run.start, other.start), min(run.stop, other.stop)
            if start < stop:
                runs.append(OwnedRun(start, stop, run.first + start - run.start, run.bucket))
        return Ownership(tuple(runs))

    def packed(self) -> Ownership:
        """The same runs, one after the other in a state of their own."""
        firsts = itertools.accumulate((run.stop - run.start for run in self.runs), initial=0)
        return Ownership(tuple(run._replace(first=first) for run, first in zip(self.runs, firsts, strict=False)))

    def spans(self) -> Iterator[slice]:
        """Where each run lies in the state."""
        return (slice(run.first, run.first + run.stop - run.start) for run in self.runs)

    def place(self, element: int) -> int:
        """The position of an owned element of the buffer in the state."""
        run = self.runs[bisect.bisect_right(self.runs, element, key=lambda run: run.start) - 1]
        assert run.start <= element < run.stop, f"element {element} is not owned"
        return run.first + element - run.start

    def segments(self) -> Iterator[tuple[OwnedRun, RuleRange]]:
        """The segments, cut to each run, without empty ones."""
        for run in self.runs:
            for segment in run.bucket.segments:
                low, high = max(segment.start, run.start), min(segment.stop, run.stop)
                if low < high:
                    yield run, RuleRange(low, high, segment.rules)

    def parameters(self) -> Iterator[OwnedParameter]:
        """The parameters of each run."""
        for run in self.runs:
            for slot in run.bucket.slots:
                low, high = max(slot.start, run.start), min(slot.start + slot.spec.numel, run.stop)
                if low < high:
                    yield OwnedParameter(slot, low - slot.start, high - slot.start, run.first + low - run.start)

    def slices(self) -> Iterator[OwnedSlice]:
        """The logical rectangles of everything owned."""
        for slot, start, stop, first in self.parameters():
            for part in slices(slot.spec, first=start, stop=stop):
                yield OwnedSlice(slot.spec, part, first + part.flat - start)


def owned_by(layout: BufferLayout, index: Mapping[str, int]) -> Ownership:
    """The runs owned by the rank at these positions on the shard axes."""
    runs, first = [], 0
    for bucket in layout.buckets:
        start, stop = bucket.run(index[bucket.shard])
        runs.append(OwnedRun(start, stop, first, bucket))
        first += stop - start
    return Ownership(tuple(runs))


def everything(layout: BufferLayout) -> Ownership:
    """All of the buffers."""
    return Ownership(tuple(OwnedRun(b.start, b.stop, b.start, b) for b in layout.buckets))
