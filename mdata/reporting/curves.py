"""Shares and epochs over a training, as numbers to be drawn: from a blend's preview. Pure.

A phase of constant shares is one interval; a ramp is up to 96, none so short that single samples would show. Hundreds
of components stay readable: the 12 that give the most are bands of their own, what is left of a group is one more band,
and all others are the last. Where there are groups, members of a group have one colour in several strengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdata.blend_planning.preview import BlendPreview, BlendRow

MOST_BANDS = 12
MOST_GROUPS = 6  # groups whose rest is a band of its own
COLOURS = 12
_RAMP_STEPS = 96
_LEAST_STEP = 64  # samples of an interval inside a ramp


@dataclass(frozen=True)
class Band:
    """One area of the drawing.

    Args:
        name: of the component, or what the others are called. members: numbers of components.
        group: of all members, if they have the same. colour: 0 to 11; None: that of "others". strength: 0 to 1.
    """

    name: str
    members: tuple[int, ...]
    group: str | None
    colour: int | None
    strength: float


@dataclass(frozen=True, eq=False)
class Curves:
    """What is drawn over the training.

    Args:
        edges: n + 1 sample numbers; shares are constant between two of them.
        phases: first sample of each phase, and whether it is a ramp.
        bands: from the bottom up.
        shares: float64[bands, n]. epochs: float64[components, n + 1], read at each edge.
    """

    edges: tuple[int, ...]
    phases: tuple[tuple[int, bool], ...]
    bands: tuple[Band, ...]
    shares: NDArray[np.float64]
    epochs: NDArray[np.float64]


def curves_of(preview: BlendPreview) -> Curves:
    """The curves of a preview whose length is known."""
    run = preview.num_samples
    assert run, "curves of a training need its length"
    edges, phases = _edges(preview, run)
    given = np.array([preview.blend.counts(edge) for edge in edges], np.float64)
    shares = (np.diff(given, axis=0) / np.diff(edges)[:, None]).T
    sizes = np.array([_size(row) for row in preview.rows], np.float64)
    bands = bands_of(preview.rows)
    of_bands = np.array([shares[list(band.members)].sum(axis=0) for band in bands])
    return Curves(tuple(edges), phases, bands, of_bands, given.T / np.maximum(sizes, 1)[:, None])


def bands_of(rows: Sequence[BlendRow]) -> tuple[Band, ...]:
    """Which components are drawn alone and which together."""
    order = sorted(range(len(rows)), key=lambda i: (-rows[i].achieved, i))
    alone = order if len(order) <= MOST_BANDS + 1 else order[:MOST_BANDS]
    left = order[len(alone) :]
    groups = _groups(rows, order)
    bands: list[Band] = []
    if groups:
        colours = {key: i % COLOURS for i, key in enumerate(groups)}
        for number, key in enumerate(groups):
            members = [i for i in alone if _key(rows, i) == key]
            rest = [i for i in left if _key(rows, i) == key]
            own = rest if number < MOST_GROUPS and isinstance(key, str) and len(rest) > 1 else []
            taken = set(own)
            left = [i for i in left if i not in taken]
            found: list[tuple[tuple[int, ...], str]] = [((i,), rows[i].name) for i in members]
            found += [(tuple(own), f"{key}: {len(own)} others")] if own else []
            group = key if isinstance(key, str) else None
            bands += [
                Band(name, of, group, colour=colours[key], strength=1 - 0.65 * place / len(found))
                for place, (of, name) in enumerate(found)
            ]
    else:
        bands = [Band(rows[i].name, (i,), None, colour=n % COLOURS, strength=1.0) for n, i in enumerate(alone)]
    if left:
        name = f"{len(left)} others" if bands and len(left) > 1 else rows[left[0]].name
        bands.append(Band(name, tuple(left), None, colour=None, strength=1.0))
    return tuple(bands)


def _groups(rows: Sequence[BlendRow], order: Sequence[int]) -> list[str | int]:
    """Groups, and the numbers of components without one, from the largest down; none where there is no group."""
    if not any(row.group for row in rows):
        return []
    sums: dict[str | int, float] = {}
    for i in order:
        key = _key(rows, i)
        sums[key] = sums.get(key, 0.0) + rows[i].achieved
    return sorted(sums, key=lambda key: -sums[key])


def _key(rows: Sequence[BlendRow], number: int) -> str | int:
    return rows[number].group or number


def _size(row: BlendRow) -> int:
    """Samples of an epoch; without a sequence length a sample is a token."""
    return row.tokens if row.samples_per_epoch is None else row.samples_per_epoch


def _edges(preview: BlendPreview, run: int) -> tuple[list[int], tuple[tuple[int, bool], ...]]:
    """Where intervals begin and end, and where phases begin."""
    starts = [start for start in dict.fromkeys(preview.starts) if start < run]
    segments = preview.blend.starts
    edges, phases = {0, run}, []
    for start, stop in zip(starts, [*starts[1:], run], strict=True):
        is_ramp = bool(((segments > start) & (segments < stop)).any())
        edges.add(start)
        phases.append((start, is_ramp))
        if is_ramp:
            steps = min(_RAMP_STEPS, max((stop - start) // _LEAST_STEP, 4), stop - start)
            edges.update(start + (stop - start) * step // steps for step in range(steps))
    return sorted(edges), tuple(phases)
