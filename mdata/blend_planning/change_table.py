"""What a change of the mixture does to each component: what was read, what is never read, and what is read again.

Computed from the two blends, before and after; no decisions are made here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec import UnsetType

from mdata.blend.blend import OpenBlend
from mdata.blend_planning.preview import samples_per_epoch


@dataclass(frozen=True)
class ChangeRow:
    """The effect of a change on one component.

    Args:
        samples, epochs: read before it. part_before, part_after: its part of the samples, just before and after.
        unread: samples of its current epoch that are never read, if it is no longer read; otherwise 0.
        again_at: sample of the blend from which text is repeated that was read before; None: never, or unknown.
    """

    name: str
    samples: int
    epochs: float
    part_before: float
    part_after: float
    unread: int
    again_at: int | None


def change_table(
    old: OpenBlend, new: OpenBlend, *, sequence_length: int, split: str, run: int | None
) -> list[ChangeRow]:
    """The effect of a change on every component.

    Args:
        old, new: before and after. sequence_length, split: of the run. run: its number of samples, if known.
    """
    assert not isinstance(new.manifest.earlier, UnsetType), "not a changed blend"
    at = new.manifest.earlier[-1].until
    sizes = samples_per_epoch(new, sequence_length, split=split)
    phased = new.phased(sizes, sequence_length)
    segments = int(np.searchsorted(phased.starts[1:-1], at, side="right"))
    after = phased.segments[segments].weights
    before = old.phased(sizes[: len(old.corpora)], sequence_length)
    last = before.segments[int(np.searchsorted(before.starts[1:-1], max(at - 1, 0), side="right"))].weights
    rows = []
    for i, (name, size, given) in enumerate(zip(new.names, sizes, phased.counts(at), strict=True)):
        goes_on = any(part.weights[i] for part in phased.segments[segments:])
        again = phased.sample_of(i, max(given, size)) if goes_on else None
        rows.append(
            ChangeRow(
                name=name,
                samples=given,
                epochs=given / size,
                part_before=float(last[i] / last.sum()) if i < len(last) else 0.0,
                part_after=float(after[i] / after.sum()),
                unread=0 if goes_on else -given % size,
                again_at=again if again is not None and (run is None or again < run) else None,
            )
        )
    return rows
