"""What a change of the mixture does to each component of a run: what was read, what never will be, what comes again.

Read off the two blends alone, before and after; nothing is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from msgspec import UnsetType

from mdata.blend.blend import OpenBlend
from mdata.blend_planning.preview import samples_per_epoch


@dataclass(frozen=True)
class ChangeRow:
    """What a change does to a component.

    Args:
        samples, epochs: read before it. part_before, part_after: of the samples, just before and from then on.
        unread: samples of its epoch at the change that are never read (it is not read any more), else 0.
        again_at: sample of the blend from which text is read again that was read before; None: never, or not known.
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
    """What a change does to every component.

    Args:
        old, new: before and after. sequence_length, split: of the run. run: its samples, if they are known.
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
