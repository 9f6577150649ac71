"""Where each parameter lies in the flat buffers, and which part of them a data-parallel rank owns.

Pure: specs and a dp size in, frozen numbers out. Parameters are sorted so that those with equal rules (weight decay;
split or copied over tp) are neighbours: a rule then covers one range, a `Segment`, and not a list of tensors. The
buffer is padded so that dp divides it; rank r owns elements [r * shard, (r + 1) * shard), whatever tensors that cuts
(Rajbhandari et al. 2020, "ZeRO", stage 1). Gradients, main weights and moments all share this one layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.parallel.params import OverTp, ParamSpec, Slice, slices

ALIGNMENT = 128  # elements; matrix kernels want operands at multiples of 16 bytes, caches of 64 or 128


@dataclass(frozen=True, slots=True)
class Slot:
    """Elements [start, start + spec.numel) of the buffer hold this parameter."""

    spec: ParamSpec
    start: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) that share one set of rules."""

    start: int
    stop: int
    decay: bool
    over_tp: OverTp


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """One rank's buffers.

    Args:
        slots: parameters in buffer order.
        segments: consecutive and covering [0, size).
        size: elements, a multiple of dp_size.
        dp_size: ranks that share the optimizer's work.
    """

    slots: tuple[Slot, ...]
    segments: tuple[Segment, ...]
    size: int
    dp_size: int

    def shard(self, dp_rank: int) -> tuple[int, int]:
        """The range that a data-parallel rank owns."""
        part = self.size // self.dp_size
        return dp_rank * part, (dp_rank + 1) * part

    def segments_within(self, start: int, stop: int) -> Iterator[Segment]:
        """The segments cut to [start, stop), empty ones left out."""
        for segment in self.segments:
            low, high = max(segment.start, start), min(segment.stop, stop)
            if low < high:
                yield Segment(low, high, segment.decay, segment.over_tp)

    def slices_within(self, start: int, stop: int) -> Iterator[tuple[ParamSpec, Slice, int]]:
        """(spec, logical rectangle, its first element in the buffer) for all that lies in [start, stop)."""
        for slot in self.slots:
            low, high = max(slot.start, start), min(slot.start + slot.spec.numel, stop)
            if low < high:
                for part in slices(slot.spec, first=low - slot.start, stop=high - slot.start):
                    yield slot.spec, part, slot.start + part.flat


def make_layout(specs: Sequence[ParamSpec], *, dp_size: int) -> BufferLayout:
    """Place the parameters; the order depends on the specs alone."""
    slots: list[Slot] = []
    segments: list[Segment] = []
    end = 0
    ordered = sorted(specs, key=_rules)  # stable: equal rules keep the model's order
    for (decay, over_tp), group in itertools.groupby(ordered, key=_rules):
        start = end
        for spec in group:
            slots.append(Slot(spec, end))
            end = _round_up(end + spec.numel, ALIGNMENT)
        segments.append(Segment(start, end, decay, over_tp))
    size = _round_up(end, ALIGNMENT * dp_size)
    last = segments[-1]
    segments[-1] = Segment(last.start, size, last.decay, last.over_tp)
    return BufferLayout(tuple(slots), tuple(segments), size, dp_size)


def _rules(spec: ParamSpec) -> tuple[bool, OverTp]:
    return spec.decay, spec.over_tp


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
