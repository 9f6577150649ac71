"""The position of each parameter in the flat buffers, and the parts of the buffers that a rank owns.

Pure: specs and axis sizes in, frozen numbers out. The buffers are divided into buckets at the borders of blocks
(parallel/buckets.py). Inside a bucket, parameters with equal rules are neighbours: a rule then covers one range, a
`Segment`, instead of a list of tensors. A bucket is padded so that its shard axis divides it; rank r of n owns the r-th
of n equal parts, regardless of tensor boundaries (Rajbhandari et al. 2020, "ZeRO"). Parameters, gradients, main weights
and moments all share this layout; buffers.py decides for which of them a rank keeps only its own runs.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer.parallel.buckets import cut_buckets
from trainer.parallel.params import ParamSpec, ShardAxis, Slice, slices

ALIGNMENT = 128  # elements; matrix kernels prefer operands at multiples of 16 bytes, caches of 64 or 128


@dataclass(frozen=True, slots=True)
class Slot:
    """Elements [start, start + spec.numel) of the buffer hold this parameter."""

    spec: ParamSpec
    start: int


class Rules(NamedTuple):
    """The rules that the parameters of a segment share; see ParamSpec."""

    decay: bool
    copies: tuple[str, ...]
    partial: tuple[str, ...]
    matrix: bool


class Segment(NamedTuple):
    """Elements [start, stop) with one set of rules."""

    start: int
    stop: int
    rules: Rules


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements [start, stop) that are reduced and gathered together.

    Args:
        shard: the axis that divides it; shard_size: ranks along it.
        slots: parameters in buffer order. segments: consecutive and covering [start, stop).
    """

    start: int
    stop: int
    shard: ShardAxis
    shard_size: int
    slots: tuple[Slot, ...]
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start

    @property
    def blocks(self) -> frozenset[int]:
        """The blocks that use its parameters."""
        return frozenset().union(*(slot.spec.blocks for slot in self.slots))

    def run(self, index: int) -> tuple[int, int]:
        """The elements that rank `index` of the shard axis owns."""
        part = (self.stop - self.start) // self.shard_size
        return self.start + index * part, self.start + (index + 1) * part


class OwnedRun(NamedTuple):
    """Elements [start, stop) of the buffer that a rank owns; they begin at `first` in its optimizer's state."""

    start: int
    stop: int
    first: int
    bucket: Bucket


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """One rank's buffers: buckets, consecutive and covering [0, size)."""

    buckets: tuple[Bucket, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return self.buckets[-1].stop

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All parameters in buffer order."""
        return tuple(slot for bucket in self.buckets for slot in bucket.slots)

    @property
    def of_block(self) -> dict[int, list[int]]:
        """The numbers of the buckets with parameters of each block."""
        found: dict[int, list[int]] = {}
        for number, bucket in enumerate(self.buckets):
            for block in bucket.blocks:
                found.setdefault(block, []).append(number)
        return found

    def owned(self, index: Mapping[str, int]) -> Ownership:
        """The runs owned by the rank at these positions on the shard axes."""
        runs, first = [], 0
        for bucket in self.buckets:
            start, stop = bucket.run(index[bucket.shard])
            runs.append(OwnedRun(start, stop, first, bucket))
            first += stop - start
        return Ownership(tuple(runs))

    def everything(self) -> Ownership:
        """All of the buffers."""
        return Ownership(tuple(OwnedRun(b.start, b.stop, b.start, b) for b in self.buckets))


class OwnedSlice(NamedTuple):
    """A logical rectangle whose elements begin at `first` in the optimizer's state."""

    spec: ParamSpec
    part: Slice
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

    def segments(self) -> Iterator[tuple[OwnedRun, Segment]]:
        """The segments, cut to each run, without empty ones."""
        for run in self.runs:
            for segment in run.bucket.segments:
                low, high = max(segment.start, run.start), min(segment.stop, run.stop)
                if low < high:
                    yield run, Segment(low, high, segment.rules)

    def parameters(self) -> Iterator[tuple[Slot, int, int, int]]:
        """(slot, first and last + 1 of its elements, their position in the state) of each parameter in each run."""
        for run in self.runs:
            for slot in run.bucket.slots:
                low, high = max(slot.start, run.start), min(slot.start + slot.spec.numel, run.stop)
                if low < high:
                    yield slot, low - slot.start, high - slot.start, run.first + low - run.start

    def slices(self) -> Iterator[OwnedSlice]:
        """The logical rectangles of everything owned."""
        for slot, first, stop, at in self.parameters():
            for part in slices(slot.spec, first=first, stop=stop):
                yield OwnedSlice(slot.spec, part, at + part.flat - first)


def make_layout(specs: Sequence[ParamSpec], sizes: Mapping[str, int], *, bucket_size: int = 0) -> BufferLayout:
    """Lay out the parameters; the order depends only on the specs.

    Args:
        sizes: ranks along each shard axis. bucket_size: least elements of a bucket; 0: see `cut_buckets`.
    """
    buckets: list[Bucket] = []
    for group in cut_buckets(specs, bucket_size=bucket_size):
        start, shard = buckets[-1].stop if buckets else 0, group[0].shard
        buckets.append(_bucket(start, group, shard, sizes[shard]))
    return BufferLayout(tuple(buckets))


def _bucket(start: int, specs: Sequence[ParamSpec], shard: ShardAxis, shard_size: int) -> Bucket:
    slots: list[Slot] = []
    segments: list[Segment] = []
    end = start
    for rules, group in itertools.groupby(sorted(specs, key=_rules), key=_rules):  # stable: keeps the model's order
        first = end
        for spec in group:
            slots.append(Slot(spec, end))
            end = _round_up(end + spec.numel, ALIGNMENT)
        segments.append(Segment(first, end, rules))
    stop = start + _round_up(end - start, ALIGNMENT * shard_size)
    segments[-1] = Segment(segments[-1].start, stop, segments[-1].rules)
    return Bucket(start, stop, shard, shard_size, tuple(slots), tuple(segments))


def _rules(spec: ParamSpec) -> Rules:
    return Rules(spec.decay, spec.copies, spec.partial, spec.matrix)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
