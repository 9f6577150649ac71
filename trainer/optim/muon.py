"""Muon (Jordan et al. 2024): a matrix is updated by its momentum made orthogonal, which needs the whole matrix.

A rank holds parts of matrices: rectangles that lie somewhere in its shard. Momentum and weights are updated where they
are; in between each matrix is put together over the ranks, made orthogonal by one of them, and every rank takes its
parts of the result. Sums of parts that do not overlap are exact, so the result does not depend on the layout.
Parameters that are no matrices, and embeddings and the head, are left to AdamW.

The update is scaled by 0.2 sqrt(max(rows, columns)) (Liu et al. 2025, "Muon is scalable", section 2.2), Megatron's
"spectral" mode times 0.2: its root mean square is then about that of AdamW, whose learning rate and weight decay serve.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.kernels.table import Kernels
from trainer.parallel.collectives import Group, all_reduce_

RMS = 0.2


@dataclass(frozen=True, slots=True)
class Matrix:
    """A logical matrix of the model, whatever the layout; q, k, v, gate and up are matrices of their own."""

    name: str
    rows: int
    columns: int

    @property
    def scale(self) -> float:
        """What its orthogonal update is multiplied by."""
        return RMS * math.sqrt(max(self.rows, self.columns))


@dataclass(frozen=True, slots=True)
class HeldPart:
    """A rectangle of a matrix in this rank's shard.

    Args:
        matrix: its number in the list of matrices. start, size: rows and columns of the rectangle. at: its first
            element in the shard, where it lies row by row.
    """

    matrix: int
    start: tuple[int, int]
    size: tuple[int, int]
    at: int

    def of(self, whole: Tensor) -> Tensor:
        """This part of a whole matrix: a view."""
        (row, column), (rows, columns) = self.start, self.size
        return whole[row : row + rows, column : column + columns]

    def within(self, shard: Tensor) -> Tensor:
        """This part in the shard: a view as a matrix."""
        return shard[self.at : self.at + self.size[0] * self.size[1]].view(self.size)


def share_out(matrices: Sequence[Matrix], *, ranks: int) -> list[int]:
    """Which rank makes each matrix orthogonal: the most expensive first, each to the rank that has least to do."""
    busy = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(matrices)
    for number in sorted(range(len(matrices)), key=lambda n: (-_cost(matrices[n]), n)):
        cost, rank = heapq.heappop(busy)
        owners[number] = rank
        heapq.heappush(busy, (cost + _cost(matrices[number]), rank))
    return owners


def _cost(matrix: Matrix) -> int:
    """Multiplications of one Newton-Schulz iteration."""
    short, long = sorted((matrix.rows, matrix.columns))
    return short * short * (2 * long + short)


def orthogonal_update(
    direction: Tensor,
    matrices: Sequence[Matrix],
    *,
    parts: Sequence[HeldPart],
    groups: Sequence[Group],
    kernels: Kernels,
    dtype: torch.dtype,
) -> Tensor:
    """The scaled orthogonal update of every part that this rank holds; 0 elsewhere. Called by all ranks of the groups.

    Args:
        direction: this rank's shard, see plain.muon_direction_.
        matrices: all of them, the same list on every rank. parts: those of this rank; an element of a matrix is held
            by one rank of the groups, so that copies over tp are listed by one of them alone.
        groups: over which matrices are cut, the shards among them.
        dtype: of the products; bf16 is enough (Jordan et al.).
    """
    rank, ranks = 0, 1
    for group in groups:
        rank, ranks = rank * group.size + group.rank, ranks * group.size
    owners, update = share_out(matrices, ranks=ranks), torch.zeros_like(direction)
    for number, matrix in enumerate(matrices):
        mine = [part for part in parts if part.matrix == number]
        whole = direction.new_zeros((matrix.rows, matrix.columns))
        for part in mine:
            part.of(whole).copy_(part.within(direction))
        whole = _summed(whole, groups)
        if owners[number] == rank:
            whole = kernels.orthogonalize(whole, dtype) * matrix.scale
        else:
            whole.zero_()
        whole = _summed(whole, groups)
        for part in mine:
            part.within(update).copy_(part.of(whole))
    return update


def _summed(whole: Tensor, groups: Sequence[Group]) -> Tensor:
    for group in groups:
        whole = all_reduce_(whole, group)
    return whole
