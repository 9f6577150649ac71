"""Slow twins of the batched read: rows of tokens, where documents begin in them, their masks and positions.

Plain lists and numpy slices, row by row. Arguments are not checked: callers pass valid ones. The fast code is
mdata_cpp/gather.hpp, sequences.hpp and rows.hpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Run = tuple[int, int]  # first token, number of tokens


def gather(
    shards: Sequence[NDArray[np.integer]], rows: Sequence[Sequence[Run]], *, width: int, fill: int
) -> list[list[int]]:
    """Each row's runs of the tokens of all shards, concatenated, then `fill` up to the width."""
    stream = [int(token) for shard in shards for token in shard]
    found = []
    for runs in rows:
        text = [token for first, count in runs for token in stream[first : first + count]]
        found.append(text + [fill] * (width - len(text)))
    return found


def cuts(document_lengths: Sequence[int], row: Run) -> list[int]:
    """Positions inside a row at which a non-empty document begins."""
    (start, count), places, token = row, [], 0
    for length in document_lengths:
        if length and start < token < start + count:
            places.append(token - start)
        token += length
    return places


@dataclass(frozen=True)
class Row:
    """A finished row: tokens and labels overlap in `text`."""

    text: list[int]
    loss: list[float] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


def finish(
    text: Sequence[int],
    count: int,
    *,
    cuts: Sequence[int] = (),
    pad: int | None = None,
    mask_eod: int | None = None,
    restart_at_eod: int | None = None,
    mask_document_ends: bool = False,
) -> Row:
    """Loss, positions and text of a row of S + 1 tokens of which `count` are real; ids are None for "no such rule"."""
    inputs, labels = text[:-1], text[1:]
    loss, positions, first = [], [], 0
    for i, (token, label) in enumerate(zip(inputs, labels, strict=True)):
        masked = i + 1 >= count or label == pad or (mask_eod is not None and token == mask_eod)
        masked = masked or (mask_document_ends and i + 1 in cuts)
        loss.append(0.0 if masked else 1.0)
        if restart_at_eod is None:
            first = max((cut for cut in cuts if cut <= i), default=0)
        positions.append(i - first)
        if restart_at_eod is not None and token == restart_at_eod:
            first = i + 1
    return Row([0 if token == pad else token for token in text], loss, positions)
