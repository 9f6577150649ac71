"""The router of a layer with experts: which experts compute a token, with which weights, and how even their load is.

All of it in at least fp32: in 16 bits logits have ties, and the choice would depend on the layout. The bias that
balances experts (Wang et al. 2024) decides the choice alone. The losses are those of Fedus et al. 2022 (balance, over
each row or over the microbatch) and Zoph et al. 2022 (z). Both, and the load, are of whole rows, whatever tokens a rank
has: sums go over tp under sequence parallelism, and over cp; each rank's gradient is that of its own tokens.

Shapes: N tokens of this rank, B rows, E experts, K of them for each token.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.layers.base import Layer, Parallel, as_input
from trainer.layers.shapes import MoEShape
from trainer.parallel.collectives import Group, all_reduce_

TINY = 1e-20  # added to a sum of sigmoids that divides


class RowLayout(NamedTuple):
    """The rows of a microbatch.

    Args:
        batch, length: B, and the tokens of each that this cp rank has. cp: ranks that share the rows.
        drops: whether experts have a capacity: not in a step of generation. measured: whether losses are wanted.
    """

    batch: int
    length: int
    cp: Group
    drops: bool = True
    measured: bool = True


class RouterLosses(NamedTuple):
    """Of a microbatch; see NamedLoss in models/stage.py.

    Args:
        balance, z: sum and weight. counts: fp64[E + 2]: tokens of each expert, dropped slots, and the sum of the
            entropy of each token's scores, in nats.
    """

    balance: tuple[Tensor, float]
    z: tuple[Tensor, float]
    counts: Tensor


class Routing(NamedTuple):
    """The choice for each token.

    Args:
        expert_NK: int64; E: dropped. weight_NK: at least fp32; 0 where dropped. dropless: nothing is dropped.
    """

    expert_NK: Tensor
    weight_NK: Tensor
    dropless: bool
    losses: RouterLosses | None


class Router(Layer):
    """D -> experts and weights of a token."""

    def __init__(self, shape: MoEShape, width: int, parallel: Parallel, *, bias: bool) -> None:
        super().__init__()
        self.shape, self.parallel = shape, parallel
        self.weight = nn.Parameter(torch.empty(shape.num_experts, width))
        self.bias = nn.Parameter(torch.empty(shape.num_experts)) if bias else None
        self.expert_bias: Tensor | None
        self.register_buffer("expert_bias", torch.empty(shape.num_experts) if shape.expert_bias else None)

    def forward(self, x_ND: Tensor, rows: RowLayout) -> Routing:
        logits_NE = score_logits(x_ND, as_input(self, "weight"))
        if self.bias is not None:
            logits_NE = logits_NE + as_input(self, "bias")
        scores_NE = logits_NE.softmax(-1) if self.shape.score == "softmax" else logits_NE.sigmoid()
        expert_NK = self.chosen(logits_NE, scores_NE)
        weight_NK = self._weights(logits_NE, scores_NE, expert_NK)
        kept_NK = self.kept(expert_NK, weight_NK, rows) if self.shape.capacity_factor and rows.drops else None
        losses = self._losses(logits_NE, scores_NE, expert_NK, kept_NK, rows) if rows.measured else None
        if kept_NK is None:
            return Routing(expert_NK, weight_NK, True, losses)
        expert_NK = torch.where(kept_NK, expert_NK, self.shape.num_experts)
        return Routing(expert_NK, torch.where(kept_NK, weight_NK, 0.0), False, losses)

    @torch.no_grad()
    def chosen(self, logits_NE: Tensor, scores_NE: Tensor) -> Tensor:
        """The experts of each token, the best first."""
        shape = self.shape
        # The order of logits is that of their softmax, which may underflow.
        by_NE = scores_NE if shape.score == "sigmoid" or not shape.normalize_weights else logits_NE
        if self.expert_bias is not None:
            by_NE = by_NE + self.expert_bias.to(by_NE.dtype)
        if shape.groups_per_token < shape.groups:
            by_NGE = by_NE.unflatten(-1, (shape.groups, -1))
            best = 1 if shape.group_score == "max" else shape.top_k // shape.groups_per_token
            best_NG = by_NGE.topk(best, -1).values.sum(-1)
            group_NG = best_NG.topk(shape.groups_per_token, -1).indices
            open_NG = torch.zeros_like(best_NG, dtype=torch.bool).scatter(-1, group_NG, True)
            by_NE = torch.where(open_NG.unsqueeze(-1), by_NGE, -math.inf).flatten(-2)
        return by_NE.topk(shape.top_k, -1).indices

    def _weights(self, logits_NE: Tensor, scores_NE: Tensor, expert_NK: Tensor) -> Tensor:
        shape = self.shape
        if not shape.normalize_weights:
            weight_NK = scores_NE.gather(-1, expert_NK)
        elif shape.score == "softmax":
            weight_NK = logits_NE.gather(-1, expert_NK).softmax(-1)
        else:
            weight_NK = scores_NE.gather(-1, expert_NK)
            if shape.top_k > 1:
                weight_NK = weight_NK / (weight_NK.sum(-1, keepdim=True) + TINY)
        return weight_NK if shape.weight_scale == 1 else weight_NK * shape.weight_scale

    @torch.no_grad()
    def kept(self, expert_NK: Tensor, weight_NK: Tensor, rows: RowLayout) -> Tensor:
        """bool[N, K]: which slots are within the capacity of their experts."""
        shape = self.shape
        weight_NE = weight_NK.new_full((len(weight_NK), shape.num_experts), -1.0).scatter(1, expert_NK, weight_NK)
        weight_BSE = weight_NE.view(rows.batch, rows.length, -1)
        if shape.capacity_of == "microbatch":  # of all rows, the first tokens of each before the second ones
            weight_BSE = weight_BSE.transpose(0, 1).reshape(1, -1, shape.num_experts)
        tokens = weight_BSE.shape[1]
        most = min(tokens, math.ceil(tokens * shape.top_k / shape.num_experts * shape.capacity_factor))
        if shape.drop == "position":
            kept_BSE = (weight_BSE >= 0).cumsum(1) <= most
        else:
            best = weight_BSE.topk(most, 1, sorted=False).indices
            kept_BSE = torch.zeros_like(weight_BSE, dtype=torch.bool).scatter(1, best, True)
        if shape.capacity_of == "microbatch":
            kept_BSE = kept_BSE.view(rows.length, rows.batch, -1).transpose(0, 1)
        return kept_BSE.reshape(weight_NE.shape).gather(1, expert_NK)

    def _losses(
        self, logits_NE: Tensor, scores_NE: Tensor, expert_NK: Tensor, kept_NK: Tensor | None, rows: RowLayout
    ) -> RouterLosses:
        shape, experts, (tp, cp) = self.shape, self.shape.num_experts, (self.parallel.tp, rows.cp)
        share_NE = scores_NE
        if shape.score == "sigmoid":
            share_NE = scores_NE / (scores_NE.sum(-1, keepdim=True) + TINY)
        z_N = logits_NE.logsumexp(-1).square()
        share_BE = self._row_sums(share_NE, rows)
        with torch.no_grad():
            # Of the plain choice: whatever bias, groups and capacity make of it.
            hit_NE = torch.zeros_like(share_NE).scatter(-1, share_NE.topk(shape.top_k, -1).indices, 1.0)
            chosen_NE = torch.zeros_like(share_NE).scatter(
                -1, expert_NK, 1.0 if kept_NK is None else kept_NK.to(share_NE)
            )
            dropped = z_N.new_zeros(()) if kept_NK is None else (~kept_NK).sum()
            entropy = -torch.special.xlogy(share_NE, share_NE).sum(dtype=torch.float64)
            parts = (
                chosen_NE.sum(0, dtype=torch.float64),
                torch.stack((dropped.double(), entropy)),
                z_N.detach().sum(dtype=torch.float64).view(1),
                self._row_sums(hit_NE, rows).double().flatten(),
                share_BE.detach().double().flatten(),
            )
            sums = torch.cat(parts)
            if self.parallel.sequence_parallel:
                sums = all_reduce_(sums, tp)
            counts = sums[: experts + 2]
            if cp.size > 1:
                sums = all_reduce_(sums.clone(), cp)
            z = sums[experts + 2]
            hits_BE, shares_BE = sums[experts + 3 :].view(2, rows.batch, experts).to(share_BE.dtype)
        tokens = rows.length * cp.size
        if shape.balance == "microbatch":
            hits_BE, share_BE, shares_BE = (x.sum(0, keepdim=True) for x in (hits_BE, share_BE, shares_BE))
            tokens *= rows.batch
        factor_BE = hits_BE * (experts / (tokens * shape.top_k) / tokens)
        balance = with_value((factor_BE * share_BE).sum(), (factor_BE * shares_BE).sum())
        weight = 1.0 if shape.balance == "microbatch" else float(rows.batch)
        all_tokens = float(rows.batch * rows.length * cp.size)
        return RouterLosses((balance, weight), (with_value(z_N.sum(), z), all_tokens), counts)

    def _row_sums(self, x_NE: Tensor, rows: RowLayout) -> Tensor:
        """The sums over this rank's tokens of each row: [B, E]."""
        num_tokens = rows.batch * rows.length
        mine = self.parallel.local_tokens(num_tokens)
        if len(x_NE) < num_tokens:
            x_NE = nn.functional.pad(x_NE, (0, 0, mine.start, num_tokens - mine.stop))
        return x_NE.view(rows.batch, rows.length, -1).sum(1)


def with_value(x: Tensor, value: Tensor) -> Tensor:
    """x, with the value of another tensor: that of all ranks, of which x is this rank's part."""
    return x + (value.to(x.dtype) - x.detach())


def score_logits(x_ND: Tensor, weight_ED: Tensor) -> Tensor:
    """x W^T in the weight's dtype, which is wider; x is saved as it is."""
    return _Logits.apply(x_ND, weight_ED)


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_ND, weight_ED)
        return x_ND.to(weight_ED.dtype) @ weight_ED.t()

    @staticmethod
    def backward(ctx: Any, dy_NE: Tensor) -> tuple[Tensor, Tensor]:
        x_ND, weight_ED = ctx.saved_tensors
        return (dy_NE @ weight_ED).to(x_ND.dtype), dy_NE.t() @ x_ND.to(weight_ED.dtype)
