"""How tokens reach the experts of other ranks, and their results come back.

By gathering: each rank gets the tokens of all ranks that have the other experts, or other parts of its own, computes
its part for all of them, and the partial results are added in rank order. Sizes are known beforehand, so nothing waits
for the host; the traffic is ep - 1 times the tokens, whatever K is. There are rows for the largest possible load.

By all-to-all: a token is sent once to each rank that has experts of it, and every slot's result comes back, so that the
sum over slots has the order of one rank. Each rank computes only what is its own. Either as many tokens travel as there
are, for which the host waits once for each layer and pass; shared experts can be started meanwhile. Or buffers have a
size, a multiple of an even load, and nothing waits.

Rows of gathered tokens can have such a size too. A choice that does not fit makes weights of tokens NaN, so that the
step changes nothing, and the run ends with an error (`Engine.check_expert_buffers`).

One object (`Gathering` or `Exchange`) knows both ways for a microbatch. Backward takes them too: gradients of results
are brought like tokens, and gradients of tokens come back like results.

Without sequence parallelism the tp ranks have the same tokens, and share each expert: their partial results are added
where they are.

Shapes: N tokens of this rank, A tokens of the ranks that share each expert with it, G ranks with other experts, S
tokens that it sends, R tokens that it receives, M rows that it computes, T slots that come back, K slots of a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.kernels.table import Kernels
from trainer.layers.base import Parallel
from trainer.parallel.collectives import (
    Group,
    Pending,
    all_gather,
    all_reduce_,
    all_to_all,
    reduce_scatter,
    start_all_gather,
    start_all_to_all,
)


class Dispatch:
    """Between the tokens of this rank and those for which it computes experts.

    Args:
        exchanges: whether tokens are sent to the ranks of their experts; otherwise all are gathered.
        buffer: the size of buffers over the slots of an even load; 0: as many as there are, or can be.

    Attributes:
        expert_rank, expert_ranks: of the ranks that have different experts. etp: those that share each; part, parts: of
            them.
        overflow: the largest load that had no room, over an even one; 0 or None: all had.
    """

    def __init__(
        self, parallel: Parallel, groups: Mapping[str, Group], *, exchanges: bool = False, buffer: float = 0.0
    ) -> None:
        tp = parallel.tp
        alone = {"etp": tp, "ep": Group.single("ep"), "experts": tp}
        etp, self.ep, experts = (groups.get(axis, group) for axis, group in alone.items())
        self.etp = etp
        self.expert_rank, self.expert_ranks, self.part, self.parts = self.ep.rank, self.ep.size, etp.rank, etp.size
        self.exchanges, self.buffer = exchanges and self.ep.size > 1, buffer
        self.overflow: Tensor | None = None
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
    def gathers(self) -> bool:
        """Whether tokens of other ranks are gathered."""
        return self._gathered.size > 1

    @property
    def is_alone(self) -> bool:
        """Whether no tokens are gathered, and no results added."""
        return not self.gathers and self._same.size == 1

    def check_room(self, load: Tensor, overflows: Tensor) -> None:
        """Note the load if it overflows, in a tensor that stays the same: CUDA graphs write to it."""
        if self.overflow is None:
            self.overflow = torch.zeros_like(load)
        self.overflow.copy_(torch.where(overflows, torch.maximum(self.overflow, load), self.overflow))

    def reduce(self, partial_A: Tensor) -> Tensor:
        """The sums of their partial results for this rank's tokens."""
        own_N = reduce_scatter(partial_A, self._gathered)
        if self._same.size == 1:
            return own_N
        return all_reduce_(own_N.clone(memory_format=torch.contiguous_format), self._same)

    def enter(self, x_N: Tensor) -> Tensor:
        """Forward: gather. Backward: reduce."""
        return x_N if self.is_alone else _Enter.apply(x_N, self)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        gathered = dispatch.gather(x_N)
        return gathered.view_as(gathered)  # which may be the input

    @staticmethod
    def backward(ctx: Any, dx_A: Tensor) -> tuple[Tensor, None]:
        return ctx.dispatch.reduce(dx_A), None


class SortedSlots(NamedTuple):
    """The slots of tokens, sorted by expert.

    Args:
        token_M: which token each row is of. row_AK: where each slot is. end_E: int32, where each expert's rows end.
        slot_M: of each row. expert_M: of each row; E for rows that nothing computes. computed_AK: which slots are;
            None: all.
    """

    token_M: Tensor
    slot_M: Tensor
    row_AK: Tensor
    end_E: Tensor
    expert_M: Tensor
    computed_AK: Tensor | None

    def gather(self, x_AK: Tensor) -> Tensor:
        """Values of slots in the order of rows: [A, K] -> [M]."""
        gathered: Tensor = _Reordered.apply(x_AK, self)
        return gathered

    def combine(self, y_MD: Tensor, kernels: Kernels) -> Tensor:
        """The sum of each token's slots: [M, D] -> [A, D]."""
        combined: Tensor = kernels.sum_slots(y_MD, self.row_AK, self.computed_AK)
        return combined


@torch.no_grad()
def gathered_way(dispatch: Dispatch, expert_AK: Tensor, num_experts: int, *, fixed: bool) -> Gathering:
    """The way of gathered tokens to this rank's experts; those of other ranks are left out; see `Exchange`."""
    own_AK = expert_AK - dispatch.expert_rank * num_experts
    own_AK = torch.where((own_AK >= 0) & (own_AK < num_experts), own_AK, num_experts)
    if not (fixed and dispatch.buffer):
        return Gathering(dispatch, sort_slots(own_AK, num_experts, all_computed=False))
    tokens, top_k = own_AK.shape
    even = tokens * top_k / dispatch.expert_ranks
    rows = min(math.ceil(dispatch.buffer * even), tokens * min(top_k, num_experts))
    load = (own_AK < num_experts).sum()
    dispatch.check_room(load.double() / even, load > rows)
    slots = sort_slots(own_AK, num_experts, all_computed=False, rows=rows)
    return Gathering(dispatch, slots, load > rows)


@torch.no_grad()
def sort_slots(expert_AK: Tensor, num_experts: int, *, all_computed: bool, rows: int | None = None) -> SortedSlots:
    """Sort slots by expert, those of an expert by token; those of expert E, which nothing computes, come last.

    Args:
        all_computed: there are no such slots. rows: that are computed; None: unknown, so there are rows for as many as
            can be: a token has at most one for each expert.
    """
    (tokens, top_k), flat = expert_AK.shape, expert_AK.flatten()
    slot = flat.argsort(stable=True)
    row = torch.empty_like(slot).scatter_(0, slot, torch.arange(len(slot), device=slot.device))
    ends_E = torch.searchsorted(flat[slot], torch.arange(num_experts, device=flat.device), right=True, out_int32=True)
    most = tokens * min(top_k, num_experts) if rows is None else rows
    slot_M = slot[:most]
    return SortedSlots(
        token_M=slot_M // top_k,
        slot_M=slot_M,
        row_AK=row.clamp(max=max(most - 1, 0)).view(expert_AK.shape),
        end_E=ends_E if rows is None else ends_E.clamp(max=most),
        expert_M=flat[slot_M],
        computed_AK=None if all_computed else expert_AK < num_experts,
    )


class _Reordered(torch.autograd.Function):
    """Forward: values of slots by row. Backward: of rows by slot."""

    @staticmethod
    def forward(ctx: Any, x_AK: Tensor, slots: SortedSlots) -> Tensor:
        ctx.slots = slots
        return x_AK.flatten()[slots.slot_M]

    @staticmethod
    def backward(ctx: Any, dx_M: Tensor) -> tuple[Tensor, None]:
        slots = ctx.slots
        dx_AK = dx_M[slots.row_AK]
        return dx_AK if slots.computed_AK is None else torch.where(slots.computed_AK, dx_AK, 0.0), None


class Gathering:
    """The way of a microbatch's tokens by gathering.

    Args:
        slots: of all gathered tokens. overflows: whether there are more than rows; None: there cannot be.

    Attributes:
        keeps: whether brought tokens are kept for backward; otherwise they are brought again.
        waits: whether the host waits in `finish`.
    """

    keeps = waits = False

    def __init__(self, dispatch: Dispatch, slots: SortedSlots, overflows: Tensor | None = None) -> None:
        self.dispatch, self.slots, self._overflows = dispatch, slots, overflows

    def finish(self) -> Gathering:
        """All of it is known."""
        return self

    def bring(self, x_ND: Tensor) -> Tensor:
        """The tokens of all ranks: [N, D] -> [A, D]."""
        return self.dispatch.gather(x_ND)

    def start_bringing(self, x_ND: Tensor) -> Pending:
        """`bring`, overlapped with the following computation."""
        return self.dispatch.start_gather(x_ND)

    def weights(self, weight_NK: Tensor) -> Tensor:
        """Those of brought tokens, differentiable."""
        weight_AK = self.dispatch.enter(weight_NK)
        return weight_AK if self._overflows is None else torch.where(self._overflows, math.nan, weight_AK)

    def take_back(self, y_MD: Tensor, kernels: Kernels) -> Tensor:
        """The sum of each token's slots, from what ranks have computed of them: [M, D] -> [N, D]."""
        return self.dispatch.reduce(self.slots.combine(y_MD, kernels))


class _Counts(NamedTuple):
    """Numbers for and from each rank."""

    send: Sequence[int]
    receive: Sequence[int]

    @staticmethod
    def even(count: int, ranks: int) -> _Counts:
        """The same number for and from each."""
        return _Counts([count] * ranks, [count] * ranks)

    def back(self) -> _Counts:
        """Those of the way back."""
        return _Counts(self.receive, self.send)


class Exchange:
    """The way of a microbatch's tokens by all-to-all, to the ranks of their experts.

    The constructor does what needs no host, and starts to exchange the numbers of tokens; `finish` does the rest.

    Args:
        expert_NK: of this rank's tokens; beyond the last one: the slot is dropped. num_experts: of each rank.
        all_computed: nothing is dropped. fixed: buffers have the size that `Dispatch.buffer` says, if there is one.

    Attributes:
        keeps, waits: see `Gathering`. slots: of the tokens that this rank receives.
    """

    keeps = True
    slots: SortedSlots

    @torch.no_grad()
    def __init__(
        self, dispatch: Dispatch, expert_NK: Tensor, num_experts: int, *, all_computed: bool, fixed: bool = False
    ) -> None:
        self.dispatch, self.ep, self.num_experts = dispatch, dispatch.ep, num_experts
        self._expert_AK = expert_AK = dispatch.gather(expert_NK)
        (tokens, top_k), ranks, device = expert_AK.shape, self.ep.size, expert_AK.device
        rank_AK = (expert_AK // num_experts).clamp(max=ranks)
        goes_AG = torch.zeros(tokens, ranks + 1, dtype=torch.bool, device=device).scatter_(1, rank_AK, True)
        self._goes_AG = goes_AG[:, :ranks]
        self._slot_TG = rank_AK.flatten().unsqueeze(1) == torch.arange(ranks, device=device)
        self._sent_AK = None if all_computed else rank_AK < ranks
        slots_G, self._overflows, self._numbers = self._slot_TG.sum(0), None, None
        self._tokens, self._slots = _Counts((), ()), _Counts((), ())
        self._is_fixed, self._finished = fixed and dispatch.buffer > 0, False
        if not self._is_fixed:
            self._numbers = self._start_agreeing(self._goes_AG.sum(0), slots_G)
            return
        even = tokens * top_k / ranks
        most = min(math.ceil(dispatch.buffer * even), tokens * min(top_k, num_experts))
        self._overflows = slots_G.max() > most
        dispatch.check_room(slots_G.max().double() / even, self._overflows)
        self._tokens, self._slots = _Counts.even(min(tokens, most), ranks), _Counts.even(most, ranks)

    def _start_agreeing(self, tokens_G: Tensor, slots_G: Tensor) -> tuple[Tensor, Any]:
        """Start to exchange the numbers of tokens and slots for each rank; (those and theirs, when they are here)."""
        mine_G2 = torch.stack((tokens_G, slots_G), dim=1)
        each = [2] * self.ep.size
        theirs_G2 = all_to_all(mine_G2.flatten(), send=each, receive=each, group=self.ep).view(-1, 2)
        numbers, arrived = torch.stack((mine_G2, theirs_G2)), None
        if numbers.is_cuda:
            numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        return numbers, arrived

    @property
    def waits(self) -> bool:
        """See `Gathering`."""
        return self._numbers is not None

    @torch.no_grad()
    def finish(self) -> Exchange:
        """Know all of the way; where buffers have no fixed size, the host waits for numbers. The first call does it."""
        if self._finished:
            return self
        self._finished = True
        (tokens, top_k), ranks, device = self._expert_AK.shape, self.ep.size, self._expert_AK.device
        if self._numbers is not None:
            numbers, arrived = self._numbers
            if arrived is not None:
                arrived.synchronize()
            self._tokens, self._slots = self._agreed(numbers, tokens=tokens, top_k=top_k)
        # Tokens in the order in which they are sent, by rank; and where the copy for each rank is, or behind all.
        sent, back = sum(self._tokens.send), sum(self._slots.send)
        each_token, each_slot = (self._tokens.send[0], self._slots.send[0]) if self._is_fixed else (None, None)
        copy_AG, fits_AG = self._places(self._goes_AG, each_token)
        self._copy_AG = torch.where(fits_AG, copy_AG, sent)
        token_A1 = torch.arange(tokens, device=device).unsqueeze(1)
        token_S = _inverse(self._copy_AG, token_A1.expand_as(self._copy_AG), sent, missing=-1)
        self.token_S = token_S.clamp(min=0)
        # Results of slots come back by rank, token and slot.
        place_TG, fits_TG = self._places(self._slot_TG, each_slot)
        place_T = torch.where(fits_TG, place_TG, 0).sum(1)
        self._place_AK = place_T.clamp_(max=max(back - 1, 0)).view(tokens, top_k)
        # What this rank computes.
        expert_SK = self._expert_AK[self.token_S]
        if self._is_fixed:  # places without a token
            expert_SK = torch.where(token_S.unsqueeze(1) < 0, ranks * self.num_experts, expert_SK)
        own_RK = self._exchanged(expert_SK, self._tokens) - self.ep.rank * self.num_experts
        own_RK = torch.where((own_RK >= 0) & (own_RK < self.num_experts), own_RK, self.num_experts)
        rows = sum(self._slots.receive)
        self.slots = sort_slots(own_RK, self.num_experts, all_computed=False, rows=rows)
        # Where parts have a size, received tokens of each rank begin at a multiple of another one.
        parts = ranks if self._is_fixed else 1
        place_TG, fits_TG = self._places((own_RK < self.num_experts).view(parts, -1).t(), each_slot)
        place_RK = torch.where(fits_TG, place_TG, rows).t().reshape(own_RK.shape)
        self._row_T = _inverse(place_RK, self.slots.row_AK, rows)
        return self

    @staticmethod
    def _places(chosen_TG: Tensor, size: int | None) -> tuple[Tensor, Tensor]:
        """Where each of those chosen for a rank is, in a part for each; and which are chosen and have room.

        Args:
            size: of each part; None: as large as needed.
        """
        number_TG = chosen_TG.cumsum(0) - 1
        if size is None:
            counts_G = chosen_TG.sum(0)
            return number_TG + counts_G.cumsum(0) - counts_G, chosen_TG
        starts_G = torch.arange(chosen_TG.shape[1], device=chosen_TG.device) * size
        return number_TG + starts_G, chosen_TG & (number_TG < size)

    def _agreed(self, numbers: Tensor, *, tokens: int, top_k: int) -> tuple[_Counts, _Counts]:
        """The numbers of tokens and slots for and from each rank, on the host."""
        ranks, slots = self.ep.size, tokens * top_k
        if numbers.is_meta:  # a rehearsal, with even loads
            return _Counts.even(min(tokens, slots // ranks), ranks), _Counts.even(slots // ranks, ranks)
        (sent, sent_slots), (received, computed) = numbers.transpose(1, 2).tolist()
        return _Counts(sent, received), _Counts(sent_slots, computed)

    def bring(self, x_ND: Tensor) -> Tensor:
        """Tokens to the ranks of their experts: [N, D] -> [R, D]."""
        return self._exchanged(self.dispatch.gather(x_ND)[self.token_S], self._tokens)

    def start_bringing(self, x_ND: Tensor) -> Pending:
        """`bring`, overlapped with the following computation; not of what other ranks gather first."""
        if self.dispatch.gathers:
            return Pending(self.bring(x_ND))
        x_SD = x_ND[self.token_S]
        send, receive = ([count * x_SD.shape[1] for count in numbers] for numbers in self._tokens)
        started = start_all_to_all(x_SD.flatten(), send=send, receive=receive, group=self.ep)
        return Pending(started.result.view(-1, x_SD.shape[1]), started.work)

    def weights(self, weight_NK: Tensor) -> Tensor:
        """Those of received tokens, differentiable."""
        if self._overflows is not None:
            weight_NK = torch.where(self._overflows, math.nan, weight_NK)
        weight_RK: Tensor = _Weights.apply(self.dispatch.enter(weight_NK), self)
        return weight_RK

    def take_back(self, y_MD: Tensor, kernels: Kernels) -> Tensor:
        """The sum of each token's slots, in their order, from what ranks have computed of them: [M, D] -> [N, D]."""
        y_TD = self._exchanged(y_MD[self._row_T], self._slots.back())
        if not len(y_TD):  # all are dropped
            return self.dispatch.reduce(y_MD.new_zeros(len(self._place_AK), y_MD.shape[1]))
        return self.dispatch.reduce(kernels.sum_slots(y_TD, self._place_AK, self._sent_AK))

    def _exchanged(self, x_SD: Tensor, counts: _Counts) -> Tensor:
        width = x_SD.shape[1]
        send, receive = ([count * width for count in numbers] for numbers in counts)
        return all_to_all(x_SD.flatten(), send=send, receive=receive, group=self.ep).view(-1, width)


def _inverse(place: Tensor, values: Tensor, size: int, *, missing: int = 0) -> Tensor:
    """The value at each place, or `missing`; those of place `size` are left out: [size]."""
    out = torch.full((size + 1,), missing, dtype=torch.int64, device=place.device)
    return out.scatter_(0, place.flatten(), values.flatten())[:size]


class _Weights(torch.autograd.Function):
    """Forward: to the ranks of the experts. Backward: back; of each weight one rank has a gradient."""

    @staticmethod
    def forward(ctx: Any, weight_AK: Tensor, way: Exchange) -> Tensor:
        ctx.way = way
        return way._exchanged(weight_AK[way.token_S], way._tokens)

    @staticmethod
    def backward(ctx: Any, dweight_RK: Tensor) -> tuple[Tensor, None]:
        way = ctx.way
        copies_SK = way._exchanged(dweight_RK, way._tokens.back())
        padded = torch.cat((copies_SK, copies_SK.new_zeros(1, copies_SK.shape[1])))
        return padded[way._copy_AG].sum(1), None
