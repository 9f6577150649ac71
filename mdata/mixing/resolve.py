"""From shares to samples: takes schedules and the sizes of a run, returns a `PhasedBlend`. Pure.

The length of a phase is given, or it is the sum of its amounts; the part of a given length that amounts leave goes to
the weights. A ramp becomes up to 1,000 segments of constant shares (fewer if there are so many components that the
table of cursors would exceed 32 MB). All problems of a blend are collected in one error, each with its numbers. Targets
count from the beginning of their schedule; caps from the beginning of the blend.

Exact targets are rounded to whole samples at the end of each segment, which ends at sample ceil(E), E the exact sum of
all targets there. Every component gets its target rounded down or up, never less than before. A target that is an
integer must be met; of the others, those are rounded up whose next whole sample is due soonest, then those with the
largest remainder, then the first. Assigning by due dates makes this possible for every schedule (earliest due date
first meets all dates that can be met, and exact shares meet them), so every count is within one sample of its target at
the end of every segment. Plain largest remainders do not achieve that: rounding one component up may leave too little
for those that are due next. Slow twin of the rounding: tests/reference/phases.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdata.errors import counted
from mdata.mixing.phased_blend import PhasedBlend, Segment
from mdata.mixing.schedule import (
    NO_LENGTH,
    NO_REST,
    NO_ROOM,
    NO_SHARE,
    RAMP_AMOUNTS,
    RAMP_LENGTH,
    BlendSchedule,
    Phase,
    blend_error,
    phase_weights,
    where_in,
)
from mdata.mixing.shares import LARGEST_SUM, WEIGHT, Share
from mdata.util.arrays import Int64s

MOST_RAMP_STEPS = 1000
_LEAST_RAMP_STEPS = 16
_CURSORS = 1 << 22


@dataclass(frozen=True, slots=True)
class Sizes:
    """The facts of a run that are needed for resolving.

    Args:
        names: of the components. samples_per_epoch: of each, in this run's split and sequence length.
        sequence_length: tokens of a sample.
        caps: maximum epochs of each; None: no cap.
    """

    names: tuple[str, ...]
    samples_per_epoch: tuple[int, ...]
    sequence_length: int
    caps: tuple[Fraction | None, ...]


@dataclass(frozen=True, slots=True)
class PhaseSamples:
    """Exact samples of each component in a phase, by its shares at the start and at the end (equal without a ramp)."""

    start: list[Fraction]
    end: list[Fraction]
    steps: int


def resolve(schedules: Sequence[BlendSchedule], sizes: Sizes) -> PhasedBlend:
    """The blend of all schedules; each ends where the next one begins.

    Raises:
        UsageError: shares, lengths or caps that cannot be met; lists every problem with its numbers.
    """
    segments: list[Segment] = []
    problems = [
        f"{name} has no sample in this split"
        for name, n in zip(sizes.names, sizes.samples_per_epoch, strict=True)
        if not n
    ]
    begin = 0
    for schedule in [] if problems else schedules:
        parts = _segments(schedule, sizes, problems)
        if problems:
            break
        if schedule.until is not None:
            parts = _cut(parts, schedule.until - begin, problems, at=schedule.until)
            begin = schedule.until
        segments += parts
    if problems:
        raise blend_error(problems)
    blend = PhasedBlend(segments)
    return _within_caps(blend, sizes)


def phase_counts(schedule: BlendSchedule, sizes: Sizes) -> list[list[int]]:
    """Whole samples of each component in each phase of a schedule of amounts.

    Raises:
        UsageError: an amount beyond its cap, or a phase without amounts.
    """
    blend = resolve([schedule], sizes)
    ends = [*phase_starts([schedule], sizes)[1:], blend.num_samples or 0]
    totals = [blend.counts(end) for end in ends]
    before = [(0,) * len(sizes.names), *totals]
    return [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, totals, strict=False)]


def phase_starts(schedules: Sequence[BlendSchedule], sizes: Sizes) -> list[int]:
    """The first sample of each phase that is reached; the blend must be resolvable."""
    starts, begin = [], 0
    for schedule in schedules:
        done = Fraction(0)
        for number, phase in enumerate(schedule.phases):
            start = begin + math.ceil(done)
            if schedule.until is not None and start >= schedule.until:
                break
            starts.append(start)
            before = schedule.phases[number - 1].shares if number else None
            samples = None if phase.endless else _samples_of_phase(phase, before, sizes, [], where="")
            done += sum(samples.end, Fraction(0)) if samples else 0
        begin = schedule.until or 0
    return starts


def _segments(schedule: BlendSchedule, sizes: Sizes, problems: list[str]) -> list[Segment]:
    """The segments of one schedule, ignoring later schedules."""
    exact: list[PhaseSamples] = []
    last: Segment | None = None
    for number, phase in enumerate(schedule.phases):
        where = where_in(number, len(schedule.phases))
        if phase.endless and number == len(schedule.phases) - 1:
            if phase.ramp or not any(share.amount for share in phase.shares):
                problems.append(where + (RAMP_LENGTH if phase.ramp else NO_SHARE))
            else:
                last = Segment(np.array(phase_weights(phase, sizes.names), np.int64), None)
            continue
        before = schedule.phases[number - 1].shares if number else None
        samples = _samples_of_phase(phase, before, sizes, problems, where=where)
        if samples is not None:
            exact.append(samples)
    if problems:
        return []
    total = sum((sum(samples.end, Fraction(0)) for samples in exact), Fraction(0))
    if total > LARGEST_SUM:
        problems.append(
            f"the blend is {counted(math.ceil(total), 'sample')} long; at most {LARGEST_SUM} can be counted"
        )
        return []
    segments = []
    if exact:
        for counts in round_targets(_targets(exact)):
            if length := int(counts.sum()):
                segments.append(Segment(counts, length))
    return [*segments, *([last] if last else [])]


def _samples_of_phase(
    phase: Phase, before: Sequence[Share] | None, sizes: Sizes, problems: list[str], *, where: str
) -> PhaseSamples | None:
    """The exact samples of a bounded phase; None if it has a problem."""
    amounts = [
        samples_of(share, epoch, sequence_length=sizes.sequence_length)
        for share, epoch in zip(phase.shares, sizes.samples_per_epoch, strict=True)
    ]
    fixed = sum(amounts, Fraction(0))
    weight_sum = sum((share.amount for share in phase.shares if share.unit == WEIGHT), Fraction(0))
    length = length_of(phase, sizes.sequence_length)
    problem = _length_problem(length, fixed, weight_sum, sizes.sequence_length)
    if phase.ramp and (before is None or fixed or any(share.unit != WEIGHT and share.amount for share in before)):
        problem = RAMP_AMOUNTS
    if problem is not None:
        problems.append(where + problem)
        return None
    rest = length - fixed if length is not None and weight_sum else Fraction(0)
    end = [
        rest * share.amount / weight_sum if share.unit == WEIGHT and share.amount else amount
        for share, amount in zip(phase.shares, amounts, strict=True)
    ]
    if not phase.ramp or before is None:
        return PhaseSamples(end, end, 1)
    sum_before = sum((share.amount for share in before), Fraction(0))
    if not sum_before:
        return None  # a problem of the phase before
    start = [rest * share.amount / sum_before for share in before]
    room = max(_LEAST_RAMP_STEPS, _CURSORS // len(phase.shares))
    steps = min(MOST_RAMP_STEPS, math.ceil(rest), room)
    if steps == 1:
        middle = [(p + q) / 2 for p, q in zip(start, end, strict=True)]
        return PhaseSamples(middle, middle, 1)
    return PhaseSamples(start, end, steps)


def samples_of(share: Share, samples_per_epoch: int, *, sequence_length: int) -> Fraction:
    """An amount in samples; 0 for a weight."""
    if share.unit == "tokens":
        return share.amount / sequence_length
    if share.unit == "epochs":
        return share.amount * samples_per_epoch
    return share.amount if share.unit == "samples" else Fraction(0)


def length_of(phase: Phase, sequence_length: int) -> Fraction | None:
    """The given length of a phase, in samples."""
    if phase.tokens is not None:
        return Fraction(phase.tokens, sequence_length)
    return Fraction(phase.samples) if phase.samples is not None else None


def _length_problem(length: Fraction | None, fixed: Fraction, weight_sum: Fraction, sequence_length: int) -> str | None:
    """What is wrong with a phase's length, given its amounts (in samples) and the sum of its weights."""
    if not fixed and not weight_sum:
        return NO_SHARE
    if length == 0:
        return "its length is 0"
    if length is None:
        if weight_sum:
            return NO_LENGTH
        return None
    needed = f"{counted(math.ceil(fixed), 'sample')} ({counted(math.ceil(fixed * sequence_length), 'token')})"
    length_text = f"{counted(math.ceil(length), 'sample')} ({counted(math.ceil(length * sequence_length), 'token')})"
    if weight_sum and fixed >= length:
        return f"its amounts ask for {needed}, its length is {length_text}; {NO_ROOM}"
    if fixed - length >= 1:
        return f"its amounts ask for {needed}, its length is {length_text}"
    if not weight_sum and length - fixed >= 1:
        return f"its amounts give {needed}, its length is {length_text}; {NO_REST}"
    return None


def _targets(exact: Sequence[PhaseSamples]) -> Targets:
    """All targets as integers over one denominator; a ramp's are lambda (s/m p + (q - p) s^2 / (2 m^2))."""
    denominator = 1
    for samples in exact:
        of_phase = math.lcm(*(value.denominator for value in (*samples.start, *samples.end)))
        denominator = math.lcm(denominator, of_phase * (2 * samples.steps**2 if samples.steps > 1 else 1))

    def integers(values: Sequence[Fraction], over: int) -> Integers:
        return np.array([int(value * (denominator // over)) for value in values], object)

    def rows() -> Iterator[Integers]:
        done: Integers = np.zeros(len(exact[0].end), object)
        for samples in exact:
            if samples.steps == 1:
                done = done + integers(samples.end, 1)
                yield done
                continue
            steps = samples.steps
            line = integers(samples.start, steps)
            bend = integers([(q - p) / 2 for p, q in zip(samples.start, samples.end, strict=True)], steps**2)
            for step in range(1, steps + 1):
                yield done + line * step + bend * step**2
            done = done + line * steps + bend * steps**2

    return Targets(sum(samples.steps for samples in exact), len(exact[0].end), denominator, rows)


def _cut(segments: Sequence[Segment], length: int, problems: list[str], *, at: int) -> list[Segment]:
    """The first `length` samples of segments; their trees stay the same, so samples before the cut do not change."""
    cut_segments: list[Segment] = []
    for segment in segments:
        room = length - sum(part.length or 0 for part in cut_segments)
        if room <= 0:
            return cut_segments
        cut_segments.append(Segment(segment.weights, room if segment.length is None else min(room, segment.length)))
    have = sum(part.length or 0 for part in cut_segments)
    if have < length:
        problems.append(f"the blend changes at sample {at:,}, {counted(length - have, 'sample')} after its end")
    return cut_segments


def _within_caps(blend: PhasedBlend, sizes: Sizes) -> PhasedBlend:
    """Refuse counts beyond a cap; an endless blend ends where the first cap is reached."""
    limits = {
        i: math.floor(cap * epoch)
        for i, (cap, epoch) in enumerate(zip(sizes.caps, sizes.samples_per_epoch, strict=True))
        if cap is not None
    }
    endless = blend.num_samples is None
    samples_read = blend.cursors[-2 if endless else -1].tolist()
    problems = [
        f"{sizes.names[i]} may be read {sizes.caps[i]} times ({counted(limit, 'sample')}), its share "
        f"asks for {counted(samples_read[i], 'sample')} ({samples_read[i] / sizes.samples_per_epoch[i]:.4g} epochs)"
        for i, limit in limits.items()
        if samples_read[i] > limit
    ]
    if problems:
        fix = "a smaller share, a larger max_epochs, or redistribute = true, which gives the excess to the others"
        raise blend_error(problems, fix=fix)
    capped = [i for i in limits if endless and blend.segments[-1].weights[i]]
    if nothing := [i for i in capped if not limits[i]]:
        problems = [f"{sizes.names[i]} may be read {sizes.caps[i]} times, less than one sample" for i in nothing]
        raise blend_error(problems, fix="a larger max_epochs, or leave the corpus out")
    ends = [end for i in capped if (end := blend.sample_of(i, limits[i])) is not None]
    return PhasedBlend(blend.segments, min(ends)) if ends else blend


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
    totals = np.zeros((targets.num_segments + 1, targets.num_components), np.int64)
    for segment, end in enumerate(ends):
        least = np.maximum(floors[segment], totals[segment])
        short = end - int(least.sum())
        may = np.flatnonzero((totals[segment] <= floors[segment]) & (remainders[segment] > 0))
        assert 0 <= short <= len(may), f"segment {segment}: {short} samples for {len(may)} components"
        first = np.lexsort((may, -remainders[segment, may], due[segment, may]))[:short]
        totals[segment + 1] = least
        totals[segment + 1, may[first]] += 1
    return np.diff(totals, axis=0)


def _rounded_down(targets: Targets) -> tuple[Int64s, Int64s, list[int]]:
    """The targets rounded down, their remainders in units of 2^-62 (above 0 unless exactly 0), and the segment ends."""
    shape = (targets.num_segments, targets.num_components)
    floors, remainders, ends = np.empty(shape, np.int64), np.empty(shape, np.int64), []
    for segment, row in enumerate(targets.rows()):
        floor = row // targets.denominator
        left = row - floor * targets.denominator
        floors[segment] = floor
        remainders[segment] = np.where(left > 0, np.maximum((left << _REMAINDER_BITS) // targets.denominator, 1), 0)
        ends.append(-(-int(row.sum()) // targets.denominator))
    return floors, remainders, ends


def _next_due(floors: Int64s) -> Int64s:
    """The segment by whose end one more whole sample is due; the number of segments if it never is."""
    due = np.full_like(floors, len(floors))
    for segment in range(len(floors) - 2, -1, -1):
        due[segment] = np.where(floors[segment + 1] > floors[segment], segment + 1, due[segment + 1])
    return due
