"""The matrices' part of a Muon update: momentum and weights stay in place, orthogonal updates are exchanged (muon.py).

A rank updates its parts of a matrix in its own runs of the buffers; only directions and orthogonal updates are sent.
The exchanges are planned once, from the parts that every rank of the pipeline stage reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from trainer.config.sections import OptimizerSection
from trainer.kernels.table import Kernels
from trainer.optim.buffers import Buffers
from trainer.optim.muon import Part, exchanged, iterations, make_rounds, parts_of, update_scale
from trainer.optim.ownership import Ownership
from trainer.parallel.collectives import Group, gather_objects


class MatrixUpdate:
    """The update of the matrices of a pipeline stage.

    Args:
        buffers: of the model. settings: of Muon.
        held: the runs of matrices whose weights and momentum this rank holds.
        groups: axis -> ranks along it; the ranks of the group "stage" orthogonalize together.

    Attributes:
        rounds: the exchanges of an update.
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
        copies = ("data",) if buffers.sharding == "none" else ()
        mine = parts_of(held, lambda axis: groups[axis].rank, copies=copies)
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

        def direction(part: Part) -> Tensor:
            where = part.element, part.element + part.numel
            mean, gradient = view("momentum_buffer", *where), buffers.gradients.view(*where)
            return kernels.muon_momentum_(mean, gradient, factor, applied, constants)

        def orthogonal(whole: Tensor) -> Tensor:
            found = kernels.orthogonalize(whole, dtype, iterations(settings))
            return found * update_scale(settings, (whole.shape[0], whole.shape[1]))

        like = torch.empty(0, dtype=buffers.main_dtype, device=buffers.parameters.values.device)
        for one in self.rounds:
            for part, update in exchanged(one, direction, update=orthogonal, like=like, group=self._stage):
                where = part.element, part.element + part.numel
                kernels.muon_apply_((view("weight", *where), buffers.rounded(*where)), update, rate, applied, decay)
