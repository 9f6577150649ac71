"""The position of each parameter in the flat buffers.

Pure: specs and axis sizes in, frozen numbers out. The buffers are divided into buckets at the borders of blocks
(parallel/buckets.py). Inside a bucket, parameters with equal rules are neighbours: a rule then covers one range, a
`RuleRange`, instead of a list of tensors. A bucket is padded so that its shard axis divides it; rank r of n owns the
r-th of n equal parts, regardless of tensor boundaries (Rajbhandari et al. 2020, "ZeRO"). ownership.py says what of it a
rank holds; parameters, gradients, main weights and moments all share this layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer.parallel.buckets import cut_buckets
from trainer.parallel.params import ParamSpec, ShardAxis

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


class RuleRange(NamedTuple):
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
    segments: tuple[RuleRange, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start

    @property
    def frozen(self) -> bool:
        """Whether its parameters keep their first values."""
        return self.slots[0].spec.frozen

    @property
    def blocks(self) -> frozenset[int]:
        """The blocks that use its parameters."""
        return frozenset().union(*(slot.spec.blocks for slot in self.slots))

    def run(self, index: int) -> tuple[int, int]:
        """The elements that rank `index` of the shard axis owns."""
        part = (self.stop - self.start) // self.shard_size
        return self.start + index * part, self.start + (index + 1) * part


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
        numbers: dict[int, list[int]] = {}
        for number, bucket in enumerate(self.buckets):
            for block in bucket.blocks:
                numbers.setdefault(block, []).append(number)
        return numbers


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
    segments: list[RuleRange] = []
    end = start
    for rules, group in itertools.groupby(sorted(specs, key=_rules), key=_rules):  # stable: keeps the model's order
        first = end
        for spec in group:
            slots.append(Slot(spec, end))
            end = _round_up(end + spec.numel, ALIGNMENT)
        segments.append(RuleRange(first, end, rules))
    stop = start + _round_up(end - start, ALIGNMENT * shard_size)
    segments[-1] = RuleRange(segments[-1].start, stop, segments[-1].rules)
    return Bucket(start, stop, shard, shard_size, tuple(slots), tuple(segments))


def _rules(spec: ParamSpec) -> Rules:
    return Rules(spec.decay, spec.copies, spec.partial, spec.matrix)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
