"""Muon (Jordan et al. 2024): a matrix is updated by its orthogonalized momentum, which needs the whole matrix.

A rank holds parts of matrices: rectangles somewhere in its runs of the buffers. Momentum and weights are updated in
place. In between, each matrix is sent to one rank of its pipeline stage, which orthogonalizes it and sends every part
back: about twice a rank's own share of the matrices is sent, whatever the number of ranks. This is done in rounds of
one matrix per rank, the most expensive first, so that a rank holds only a matrix or two in addition, and the ranks of a
round have about equal work. A matrix is always computed alone, as a whole and in one piece, so its bits do not depend
on the layout. The exchanges are planned once, from the parts that every rank of the stage reports; the plan is pure.
docs/design/parallel.md has the reasons.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.config.sections import OptimizerSection
from trainer.kernels.table import Kernels
from trainer.optim.buffers import Buffers
from trainer.optim.ownership import Ownership
from trainer.parallel.collectives import Group, all_to_all, gather_objects
from trainer.parallel.params import Slice, is_first_copy, slices

# (a, b, c) of successive Newton-Schulz iterations, repeated: that of Jordan et al., and that of NVIDIA's
# emerging_optimizers, Megatron-LM's default.
COEFFICIENTS: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


class MatrixPart(NamedTuple):
    """A rectangle of a logical matrix that a rank holds.

    Args:
        name: of the matrix; q, k, v, gate and up are separate matrices, and so is each expert of a tensor with three
            dims, whose number follows its name. shape: of the whole matrix.
        start, size: rows and columns of the rectangle.
        counts: whether it is the first of its copies, which is the one that is sent.
        element: index of the buffer's element at which it begins, row-major.
    """

    name: str
    shape: tuple[int, int]
    start: tuple[int, int]
    size: tuple[int, int]
    counts: bool
    element: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.size[0] * self.size[1]

    def of(self, matrix: Tensor) -> Tensor:
        """This part of a whole matrix: a view."""
        (row, column), (rows, columns) = self.start, self.size
        return matrix[row : row + rows, column : column + columns]


Parts = tuple[MatrixPart, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange, from the view of one rank: rank i orthogonalizes the i-th matrix of the round.

    Args:
        mine: by rank, this rank's parts of that rank's matrix.
        theirs: by rank, its parts of this rank's matrix; all empty if there are fewer matrices than ranks.
    """

    mine: tuple[Parts, ...]
    theirs: tuple[Parts, ...]


def parts_of(owned: Ownership, index: Callable[[str], int], *, sharded: bool = True) -> Parts:
    """The parts of matrices that a rank holds.

    Args:
        owned: its runs of matrices. index: axis -> its position on it.
        sharded: False: data-parallel ranks hold copies, each matrix along its own axis, as experts differ between them.
    """
    parts: list[MatrixPart] = []
    for slot, low, high, _ in owned.parameters():
        counts = is_first_copy((*slot.spec.copies, *(() if sharded else (slot.spec.shard,))), index)
        for part in slices(slot.spec, first=low, stop=high):
            parts += _matrices(part, counts=counts, element=slot.start + part.flat)
    return tuple(parts)


def _matrices(part: Slice, *, counts: bool, element: int) -> Iterator[MatrixPart]:
    """The parts of matrices in a rectangle of a logical tensor, whose last two dims are a matrix's."""
    (*_, rows, columns), (*_, row, column), (*_, height, width) = part.shape, part.start, part.size
    numbers = itertools.product(*(range(a, a + n) for a, n in zip(part.start[:-2], part.size[:-2], strict=True)))
    for place, number in enumerate(numbers):
        name = part.name + "".join(f"[{index}]" for index in number)
        where = element + place * height * width
        yield MatrixPart(name, (rows, columns), (row, column), (height, width), counts, where)


def make_rounds(parts: Sequence[Parts], rank: int) -> tuple[Round, ...]:
    """The exchanges of a step: the same on every rank, each from the view of one rank."""
    shapes: dict[str, tuple[int, int]] = {}
    held: list[dict[str, list[MatrixPart]]] = []
    for of_rank in parts:
        by_name: dict[str, list[MatrixPart]] = defaultdict(list)
        for part in of_rank:
            shapes[part.name] = part.shape
            by_name[part.name].append(part)
        held.append(by_name)
    for name, (rows, columns) in shapes.items():
        counted = _numel([part for by_name in held for part in by_name.get(name, ()) if part.counts])
        assert counted == rows * columns, f"ranks send {counted} elements of {name}, which has {rows * columns}"
    order, ranks, rounds = sorted(shapes, key=lambda name: (-_cost(shapes[name]), name)), len(parts), []
    for begin in range(0, len(order), ranks):
        names = order[begin : begin + ranks]
        mine = tuple(tuple(held[rank].get(name, ())) for name in names)
        theirs = tuple(tuple(of_rank.get(names[rank], ())) if rank < len(names) else () for of_rank in held)
        rounds.append(Round(mine + ((),) * (ranks - len(names)), theirs))
    return tuple(rounds)


def _cost(shape: tuple[int, int]) -> int:
    """Multiplications of one Newton-Schulz iteration."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def update_scale(settings: OptimizerSection, shape: tuple[int, int]) -> float:
    """The factor of the orthogonal matrix for a shape [outputs, inputs]."""
    outputs, inputs = shape
    scale = {
        "spectral": max(outputs, inputs),  # Liu et al. 2025, "Muon is scalable", section 2.2, with a factor of 0.2
        "shape_scaling": max(1.0, outputs / inputs),  # Jordan et al. 2024
        "unit_rms_norm": outputs / inputs,  # Bernstein et al. 2024
    }
    return settings.muon_extra_scale_factor * math.sqrt(scale[settings.muon_scale_mode])


def iterations(settings: OptimizerSection) -> tuple[tuple[float, float, float], ...]:
    """The coefficients of each Newton-Schulz iteration."""
    coefficients = COEFFICIENTS[settings.muon_coefficient_type]
    return tuple(coefficients[i % len(coefficients)] for i in range(settings.muon_ns_steps))


def exchanged(
    round_: Round,
    direction: Callable[[MatrixPart], Tensor],
    *,
    update: Callable[[Tensor], Tensor],
    like: Tensor,
    group: Group,
) -> Iterator[tuple[MatrixPart, Tensor]]:
    """Run a round: yields each part of this rank, and its part of the update as a flat tensor.

    Args:
        direction: gives a part's flat tensor; called once per part. update: computes that of a whole matrix.
        like: a tensor of their dtype and device.
    """
    asked = [[(part, direction(part)) for part in parts] for parts in round_.mine]
    sent = [[tensor for part, tensor in of_rank if part.counts] for of_rank in asked]
    counted = [[part for part in parts if part.counts] for parts in round_.theirs]
    flat = torch.cat([like.new_empty(0), *itertools.chain(*sent)])
    receive = [_numel(parts) for parts in counted]
    arrived = all_to_all(flat, send=[sum(map(len, tensors)) for tensors in sent], receive=receive, group=group)
    back = [like.new_empty(0)]
    if any(round_.theirs):
        matrix = like.new_zeros(next(parts[0].shape for parts in round_.theirs if parts))
        given = [part for parts in counted for part in parts]
        for part, values in zip(given, arrived.split([part.numel for part in given]), strict=True):
            part.of(matrix).copy_(values.view(part.size))
        matrix = update(matrix)
        back = [part.of(matrix).flatten() for parts in round_.theirs for part in parts]
    receive = [_numel(parts) for parts in round_.mine]
    flat = all_to_all(torch.cat(back), send=[_numel(parts) for parts in round_.theirs], receive=receive, group=group)
    own = [part for parts in round_.mine for part in parts]
    yield from zip(own, flat.split([part.numel for part in own]), strict=True)


def _numel(parts: Sequence[MatrixPart]) -> int:
    return sum(part.numel for part in parts)


class MatrixUpdate:
    """The update of the matrices of a pipeline stage.

    Args:
        buffers: of the model. settings: of Muon.
        held: the runs of matrices whose weights and momentum this rank holds.
        groups: axis -> ranks along it; the ranks of the group "stage" orthogonalize together.
    """

    def __init__(
        self,
        buffers: Buffers,
        settings: OptimizerSection,
        *,
        held: Ownership,
        groups: Mapping[str, Group],
        kernels: Kernels,
    ) -> None:
        self._buffers, self._settings, self._kernels, self._stage = buffers, settings, kernels, groups["stage"]
        mine = parts_of(held, lambda axis: groups[axis].rank, sharded=buffers.sharding != "none")
        self.rounds = make_rounds(gather_objects(mine, self._stage), self._stage.rank)

    def update_(
        self,
        view: Callable[[str, int, int], Tensor],
        factor: Tensor,
        *,
        rates: tuple[Tensor, float | Tensor],
        applied: Tensor,
    ) -> None:
        """Update weights, momentum and parameters if `applied`.

        Args:
            view: (name, start, stop) -> a tensor of the state for these elements of the buffers.
            factor: by which gradients are multiplied. rates: learning rate and weight decay.
        """
        settings, buffers, kernels, (rate, decay) = self._settings, self._buffers, self._kernels, rates
        dtype = torch.bfloat16 if buffers.parameters.values.itemsize == 2 else buffers.parameters.values.dtype
        constants = (settings.muon_momentum, settings.muon_nesterov)

        def direction(part: MatrixPart) -> Tensor:
            where = part.element, part.element + part.numel
            mean, gradient = view("momentum_buffer", *where), buffers.gradients.view(*where)
            return kernels.muon_momentum_(mean, gradient, factor, applied, constants)

        def orthogonal(matrix: Tensor) -> Tensor:
            orthogonalized = kernels.orthogonalize(matrix, dtype, iterations(settings))
            return orthogonalized * update_scale(settings, (matrix.shape[0], matrix.shape[1]))

        like = torch.empty(0, dtype=buffers.main_dtype, device=buffers.parameters.values.device)
        for round_ in self.rounds:
            for part, update in exchanged(round_, direction, update=orthogonal, like=like, group=self._stage):
                where = part.element, part.element + part.numel
                kernels.muon_apply_((view("weight", *where), buffers.rounded(*where)), update, rate, applied, decay)
