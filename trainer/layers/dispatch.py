"""How tokens reach the experts of other ranks, and their results come back.

By gathering: each rank gets the tokens of all ranks that have the other experts, or other parts of its own, computes
its part for all of them, and the partial results are added in rank order. Sizes are known beforehand, so nothing waits
for the host; the traffic is ep - 1 times the tokens, whatever K is.

By all-to-all: a token is sent once to each rank that has experts of it, and every slot's result comes back, so that the
sum over slots has the order of one rank. Each rank computes only what is its own, but the host waits for the numbers of
tokens, once for each layer and pass. One object (`Exchange`) knows the way there and back.

Without sequence parallelism the tp ranks have the same tokens, and share each expert: their partial results are added
where they are.

Shapes: N tokens of this rank, A tokens of the ranks that share each expert with it, S tokens that it sends, R tokens
that it receives, M rows that it computes, T slots that come back, K slots of a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.layers.base import Parallel
from trainer.parallel.collectives import (
    Group,
    Pending,
    all_gather,
    all_reduce_,
    all_to_all,
    reduce_scatter,
    start_all_gather,
)


class Dispatch:
    """Between the tokens of this rank and those for which it computes experts.

    Args:
        exchanges: whether tokens are sent to the ranks of their experts; otherwise all are gathered.

    Attributes:
        expert_rank, expert_ranks: of the ranks that have different experts. part, parts: of those that share each.
    """

    def __init__(self, parallel: Parallel, groups: Mapping[str, Group], *, exchanges: bool = False) -> None:
        tp = parallel.tp
        alone = {"etp": tp, "ep": Group.single("ep"), "experts": tp}
        etp, self.ep, experts = (groups.get(axis, group) for axis, group in alone.items())
        self.expert_rank, self.expert_ranks, self.part, self.parts = self.ep.rank, self.ep.size, etp.rank, etp.size
        self.exchanges = exchanges and self.ep.size > 1
        apart = parallel.sequence_parallel or tp.size == 1  # every rank has tokens of its own
        assert apart or etp.size == tp.size, "tp ranks with the same tokens share each expert"
        gathered = (etp if apart else Group.single("etp")) if self.exchanges else (experts if apart else self.ep)
        self._gathered, self._same = gathered, Group.single("tp") if apart else tp

    def gather(self, x_N: Tensor) -> Tensor:
        """What all of these ranks have: [N, ...] -> [A, ...]."""
        return all_gather(x_N, self._gathered)

    def start_gather(self, x_N: Tensor) -> Pending:
        """`gather`, overlapped with the following computation."""
        return start_all_gather(x_N, self._gathered)

    @property
    def is_alone(self) -> bool:
        """Whether no tokens are gathered, and no results added."""
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


class _Counts(NamedTuple):
    """Numbers for and from each rank."""

    send: Sequence[int]
    receive: Sequence[int]


class Exchange:
    """The way of a microbatch's tokens to the ranks of their experts, and of the results back.

    Args:
        expert_AK: of all ranks; beyond the last one: the slot is dropped. num_experts: of each rank.

    Attributes:
        rows: M.
    """

    @torch.no_grad()
    def __init__(self, expert_AK: Tensor, num_experts: int, ep: Group) -> None:
        self.ep, self.num_experts = ep, num_experts
        (tokens, top_k), ranks, device = expert_AK.shape, ep.size, expert_AK.device
        rank_AK = (expert_AK // num_experts).clamp(max=ranks)
        goes_AG = torch.zeros(tokens, ranks + 1, dtype=torch.bool, device=device).scatter_(1, rank_AK, True)[:, :ranks]
        slots_G = (rank_AK.flatten().unsqueeze(1) == torch.arange(ranks, device=device)).sum(0)
        self._tokens, self._slots = self._agree(goes_AG.sum(0), slots_G, tokens=tokens, top_k=top_k)
        self.rows = sum(self._slots.receive)
        # Tokens in the order in which they are sent, by rank; and where the copy for each rank is, or behind all.
        goes_GA = goes_AG.t().flatten()
        sent = sum(self._tokens.send)
        self.token_S = goes_GA.to(torch.int8).argsort(descending=True, stable=True)[:sent] % tokens
        self._copy_AG = torch.where(goes_GA, goes_GA.cumsum(0) - 1, sent).view(ranks, tokens).t()
        # Slots in the order in which their results come back: by rank, token and slot.
        back = sum(self._slots.send)
        slot_T = rank_AK.flatten().argsort(stable=True)[:back]
        self._token_T = slot_T // top_k
        place = torch.full((tokens * top_k,), back, dtype=torch.int64, device=device)
        self._place_AK = place.scatter_(0, slot_T, torch.arange(len(slot_T), device=device)).view(tokens, top_k)

    def _agree(self, tokens_G: Tensor, slots_G: Tensor, *, tokens: int, top_k: int) -> tuple[_Counts, _Counts]:
        """The numbers of tokens and slots for and from each rank, on the host."""
        mine_G2 = torch.stack((tokens_G, slots_G), dim=1)
        each = [2] * self.ep.size
        theirs_G2 = all_to_all(mine_G2.flatten(), send=each, receive=each, group=self.ep).view(-1, 2)
        if mine_G2.is_meta:  # a rehearsal, with even loads
            even = [[number] * self.ep.size for number in (tokens * min(top_k, self.ep.size), tokens * top_k)]
            first, second = ([number // self.ep.size for number in numbers] for numbers in even)
            return _Counts(first, first), _Counts(second, second)
        (sent, slots), (received, computed) = torch.stack((mine_G2, theirs_G2)).transpose(1, 2).tolist()
        return _Counts(sent, received), _Counts(slots, computed)

    def send(self, x_AD: Tensor) -> Tensor:
        """To the ranks of the experts: [A, D] -> [R, D]."""
        return self._exchange(_Copied.apply(x_AD, self), self._tokens)

    def send_experts(self, expert_AK: Tensor) -> Tensor:
        """The experts of received tokens, by their numbers here; those of other ranks are `num_experts`."""
        own_RK = _exchanged(expert_AK[self.token_S], self._tokens, self.ep) - self.ep.rank * self.num_experts
        return torch.where((own_RK >= 0) & (own_RK < self.num_experts), own_RK, self.num_experts)

    def bring_back(self, y_MD: Tensor) -> Tensor:
        """The sum of each token's slots, from results in the order of received tokens and their slots: [A, D]."""
        back = _Counts(self._slots.receive, self._slots.send)
        combined: Tensor = _Combined.apply(self._exchange(y_MD, back), self)
        return combined

    def _exchange(self, x_SD: Tensor, counts: _Counts) -> Tensor:
        exchanged: Tensor = _Exchanged.apply(x_SD, counts, self.ep)
        return exchanged


class _Copied(torch.autograd.Function):
    """Forward: a copy of a token for each rank. Backward: the sum of the copies' gradients, in rank order."""

    @staticmethod
    def forward(ctx: Any, x_AD: Tensor, plan: Exchange) -> Tensor:
        ctx.plan = plan
        return x_AD[plan.token_S]

    @staticmethod
    def backward(ctx: Any, dx_SD: Tensor) -> tuple[Tensor, None]:
        padded = torch.cat((dx_SD, dx_SD.new_zeros(1, *dx_SD.shape[1:])))
        return padded[ctx.plan._copy_AG].sum(1), None


class _Combined(torch.autograd.Function):
    """Forward: the sum of each token's slots, in their order. Backward: the token's gradient for each slot."""

    @staticmethod
    def forward(ctx: Any, y_TD: Tensor, plan: Exchange) -> Tensor:
        ctx.plan = plan
        padded = torch.cat((y_TD, y_TD.new_zeros(1, y_TD.shape[1])))
        return padded[plan._place_AK].sum(1)

    @staticmethod
    def backward(ctx: Any, dout_AD: Tensor) -> tuple[Tensor, None]:
        return dout_AD[ctx.plan._token_T], None


class _Exchanged(torch.autograd.Function):
    """Forward: rows to and from each rank. Backward: the gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, counts: _Counts, group: Group) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _exchanged(x_SD, counts, group)

    @staticmethod
    def backward(ctx: Any, dx_RD: Tensor) -> tuple[Tensor, None, None]:
        back = _Counts(ctx.counts.receive, ctx.counts.send)
        return _exchanged(dx_RD, back, ctx.group), None, None


def _exchanged(x_SD: Tensor, counts: _Counts, group: Group) -> Tensor:
    width = x_SD.shape[1]
    send, receive = ([count * width for count in numbers] for numbers in counts)
    return all_to_all(x_SD.flatten(), send=send, receive=receive, group=group).view(-1, width)
