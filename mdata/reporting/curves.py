"""Shares and epochs over training, as numbers for the drawings, computed from a blend's preview. Pure.

A phase of constant shares is one interval; a ramp is up to 96, none so short that single samples would show. To keep
hundreds of components readable, the 12 largest get their own bands, the rest of each group is one more band, and all
others are the last. If there are groups, the members of a group have one colour in several strengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdata.blend_planning.preview import BlendPreview, BlendRow

MOST_BANDS = 12
MOST_GROUPS = 6  # groups whose rest gets its own band
COLOURS = 12
_RAMP_STEPS = 96
_LEAST_STEP = 64  # samples of an interval inside a ramp


@dataclass(frozen=True)
class Band:
    """One area of the drawing.

    Args:
        name: of the component, or of the rest. members: numbers of components.
        group: of all members, if they have the same. colour: 0 to 11; None: that of "others". strength: 0 to 1.
    """

    name: str
    members: tuple[int, ...]
    group: str | None
    colour: int | None
    strength: float


@dataclass(frozen=True, eq=False)
class Curves:
    """The data that is drawn over training.

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
    samples_read = np.array([preview.blend.counts(edge) for edge in edges], np.float64)
    shares = (np.diff(samples_read, axis=0) / np.diff(edges)[:, None]).T
    sizes = np.array([_size(row) for row in preview.rows], np.float64)
    bands = bands_of(preview.rows)
    of_bands = np.array([shares[list(band.members)].sum(axis=0) for band in bands])
    return Curves(tuple(edges), phases, bands, of_bands, samples_read.T / np.maximum(sizes, 1)[:, None])


def bands_of(rows: Sequence[BlendRow]) -> tuple[Band, ...]:
    """Decide which components get their own band and which are drawn together."""
    order = sorted(range(len(rows)), key=lambda i: (-rows[i].achieved, i))
    alone = set(order if len(order) <= MOST_BANDS + 1 else order[:MOST_BANDS])
    # A component without a group is its own group.
    members: dict[str | int, list[int]] = {}
    for i in order:
        members.setdefault(rows[i].group or i, []).append(i)
    keys = sorted(members, key=lambda key: -sum(rows[i].achieved for i in members[key]))
    bands: list[Band] = []
    left = set(order) - alone
    for number, key in enumerate(keys):
        group = key if isinstance(key, str) else None
        members_and_names: list[tuple[tuple[int, ...], str]] = [
            ((i,), rows[i].name) for i in members[key] if i in alone
        ]
        rest = tuple(i for i in members[key] if i not in alone)
        if group is not None and number < MOST_GROUPS and len(rest) > 1:
            members_and_names.append((rest, f"{key}: {len(rest)} others"))
            left -= set(rest)
        bands += [
            Band(name, of, group, colour=number % COLOURS, strength=1 - 0.65 * place / len(members_and_names))
            for place, (of, name) in enumerate(members_and_names)
        ]
    if left:
        others = tuple(i for i in order if i in left)
        name = f"{len(others)} others" if bands and len(others) > 1 else rows[others[0]].name
        bands.append(Band(name, others, None, colour=None, strength=1.0))
    return tuple(bands)


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
