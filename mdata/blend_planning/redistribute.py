"""Redistributes a blend whose caps are reached: capped samples go to the other components by their weights.

This is computed once, for one length, sequence length and split, and recorded in samples; a run needs no such rule.
Phase by phase, a component whose share would exceed its cap gets what is left up to the cap, and the rest is divided
again among the other weights until no cap is exceeded. Amounts are not reduced: an amount beyond its cap stays an
error.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import msgspec
from msgspec import UNSET

from mdata.blend.blend import OpenBlend
from mdata.blend_planning.preview import sizes_of
from mdata.errors import UsageError, counted
from mdata.manifest.blend_schedule import phases_of, schedules_of, stored_phase
from mdata.manifest.ids import sealed
from mdata.mixing.resolve import Sizes, length_of, phase_counts, samples_of
from mdata.mixing.schedule import BlendSchedule, Phase, blend_error, where_in
from mdata.mixing.shares import WEIGHT, Share, as_text


def redistribute_blend(
    blend: OpenBlend,
    *,
    sequence_length: int | None = None,
    samples: int | None = None,
    tokens: int | None = None,
    split: str = "100,0,0",
) -> OpenBlend:
    """The blend with every phase in samples, no component beyond its cap.

    Args:
        blend: with caps that may be reached. sequence_length, split: of the run.
        samples, tokens: length of the run, for an endless last phase.

    Raises:
        UsageError: a missing length, or one that all caps together cannot fill; a ramp, or a changed blend.
    """
    schedules = schedules_of(blend.manifest)
    if sequence_length is None or len(schedules) > 1 or any(phase.ramp for phase in schedules[0].phases):
        raise UsageError(
            "this blend cannot be redistributed",
            found="no --sequence-length" if sequence_length is None else "ramps, or a change of an earlier blend",
            expected="a sequence length, and phases of constant shares",
        )
    sizes = sizes_of(blend, sequence_length, split=split)
    run = samples if samples is not None else None if tokens is None else -(-tokens // sequence_length)
    counts = phase_counts(_within_caps(schedules[0].phases, sizes, run), sizes)
    phases = [stored_phase(Phase(tuple(Share(str(count), "samples") for count in row))) for row in counts]
    before = msgspec.to_builtins([stored_phase(phase) for phase in phases_of(blend.manifest)])
    notes = {"redistributed": {"sequence_length": sequence_length, "split": split, "asked": before}}
    changed = msgspec.structs.replace(
        blend.manifest, phases=phases, groups=UNSET, notes={**blend.manifest.notes, **notes}
    )
    return OpenBlend(sealed(changed), blend.corpora, blend.folder)


def _within_caps(phases: Sequence[Phase], sizes: Sizes, run: int | None) -> BlendSchedule:
    """The phases in (fractional) samples, with no weighted component beyond its cap."""
    limits = [
        None if cap is None else Fraction(int(cap * size))
        for cap, size in zip(sizes.caps, sizes.samples_per_epoch, strict=True)
    ]
    used = [Fraction(0)] * len(limits)
    made: list[Phase] = []
    for number, phase in enumerate(phases):
        each = zip(phase.shares, sizes.samples_per_epoch, strict=True)
        amounts = [samples_of(share, epoch, sequence_length=sizes.sequence_length) for share, epoch in each]
        length = _length(phase, sizes, amounts, run=run, done=sum(used, Fraction(0)))
        rooms = [None if limit is None else limit - u for limit, u in zip(limits, used, strict=True)]
        filled = _filled(phase, amounts, length - sum(amounts, Fraction(0)), rooms)
        if filled is None:
            pairs = zip(rooms, phase.shares, strict=True)
            can = sum(amounts, Fraction(0)) + sum(room for room, share in pairs if room and share.amount)
            where = where_in(number, len(phases))
            raise blend_error(
                [f"{where}all caps together leave {counted(int(can), 'sample')}, its length is {int(length):,}"]
            )
        used = [a + b for a, b in zip(used, filled, strict=True)]
        made.append(Phase(tuple(Share(as_text(x), "samples") for x in filled)))
    return BlendSchedule(tuple(made))


def _filled(
    phase: Phase, amounts: Sequence[Fraction], rest: Fraction, rooms: Sequence[Fraction | None]
) -> list[Fraction] | None:
    """Amounts, plus `rest` samples by weight with no component above its `room`; None if the rooms are too small."""
    filled = list(amounts)
    open_ = {i: share.amount for i, share in enumerate(phase.shares) if share.unit == WEIGHT and share.amount}
    while rest > 0:
        total = sum(open_.values(), Fraction(0))
        if not total:
            return None
        over = [i for i, w in open_.items() if (room := rooms[i]) is not None and rest * w / total > room]
        for i in over:
            room = rooms[i]
            assert room is not None, "only a component with a cap can be over it"
            filled[i] = max(room, Fraction(0))
            rest -= filled[i]
            del open_[i]
        if not over:
            for i, weight in open_.items():
                filled[i] = rest * weight / total
            return filled
    return filled


def _length(phase: Phase, sizes: Sizes, amounts: Sequence[Fraction], *, run: int | None, done: Fraction) -> Fraction:
    length = length_of(phase, sizes.sequence_length)
    if length is not None:
        return length
    if not phase.endless:
        return sum(amounts, Fraction(0))
    if run is None or run <= done:
        raise UsageError("redistributing needs the length of the training", fix="--samples or --tokens")
    return run - done
