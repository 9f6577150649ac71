"""How tokens reach the experts of other ranks, and their results come back.

By gathering: each rank gets the tokens of all ranks that have the other experts, or other parts of its own, computes
its part for all of them, and the partial results are added in rank order. Sizes are known beforehand, so nothing waits
for the host; the traffic is ep - 1 times the tokens, whatever K is. Without sequence parallelism the tp ranks have the
same tokens, and share each expert: their partial results are added where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainer.layers.base import Parallel
from trainer.parallel.collectives import Group, Pending, all_gather, all_reduce_, reduce_scatter, start_all_gather


class Dispatch:
    """Between the tokens of this rank and those for which it computes experts.

    Attributes:
        expert_rank, expert_ranks: of the ranks that have different experts. part, parts: of those that share each.
    """

    def __init__(self, parallel: Parallel, groups: Mapping[str, Group]) -> None:
        tp = parallel.tp
        alone = {"etp": tp, "ep": Group.single("ep"), "experts": tp}
        etp, ep, experts = (groups.get(axis, group) for axis, group in alone.items())
        self.expert_rank, self.expert_ranks, self.part, self.parts = ep.rank, ep.size, etp.rank, etp.size
        apart = parallel.sequence_parallel or tp.size == 1  # every rank has tokens of its own
        self._gathered, self._same = (experts, Group.single("tp")) if apart else (ep, tp)
        assert apart or etp.size == tp.size, "tp ranks with the same tokens share each expert"

    def gather(self, x_N: Tensor) -> Tensor:
        """What all of these ranks have: [N, ...] -> [A, ...]."""
        return all_gather(x_N, self._gathered)

    def start_gather(self, x_N: Tensor) -> Pending:
        """`gather`, overlapped with the following computation."""
        return start_all_gather(x_N, self._gathered)

    @property
    def is_alone(self) -> bool:
        """Whether this rank has all experts."""
        return self._gathered.size == 1 and self._same.size == 1

    def reduce(self, partial_A: Tensor) -> Tensor:
        """The sums of their partial results for this rank's tokens."""
        own_N = reduce_scatter(partial_A, self._gathered)
        if self._same.size == 1:
            return own_N
        return all_reduce_(own_N.clone(memory_format=torch.contiguous_format), self._same)

    def enter(self, x_N: Tensor) -> Tensor:
        """Forward: gather. Backward: reduce."""
        return x_N if self.is_alone else _Enter.apply(x_N, self)

    def leave(self, partial_A: Tensor) -> Tensor:
        """Forward: reduce. Backward: gather."""
        return partial_A if self.is_alone else _Leave.apply(partial_A, self)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        gathered = dispatch.gather(x_N)
        return gathered.view_as(gathered)  # which may be the input

    @staticmethod
    def backward(ctx: Any, dx_A: Tensor) -> tuple[Tensor, None]:
        return ctx.dispatch.reduce(dx_A), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_A: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return dispatch.reduce(partial_A)

    @staticmethod
    def backward(ctx: Any, dout_N: Tensor) -> tuple[Tensor, None]:
        return ctx.dispatch.gather(dout_N), None
