"""Which blocks of a stage are recomputed together, from the numbers of the [recompute] section.

Pure, no torch: both the model and the memory estimate use it.
"""

from __future__ import annotations

from typing import NamedTuple


class RecomputedChunk(NamedTuple):
    """Neighbouring blocks, and whether only their input is saved."""

    blocks: range
    again: bool


def chunks(blocks: range, *, method: str, layers: int) -> list[RecomputedChunk]:
    """How the blocks of a stage are recomputed.

    Args:
        method: "uniform": all, in chunks of `layers`; "block": the first `layers` of them, one by one.
    """
    if method == "uniform":
        return [RecomputedChunk(blocks[first : first + layers], True) for first in range(0, len(blocks), layers)]
    return [RecomputedChunk(blocks[i : i + 1], i < layers) for i in range(len(blocks))]
