"""Causal attention of a rank's two chunks of each row, with communication beside computation.

The chunks of a rank attend to each other in one causal call, while the keys of other ranks travel. Of these, both
chunks attend to the earlier chunks of lower ranks, and the later chunk to all that higher ranks hold: one call each,
without a mask. Results are merged (kernels/chunk_attention.py). Backward begins with the keys of others, whose
gradients travel while those of own keys are computed. The gradient of a key is summed over the other ranks before that
of its own is added; each sum is rounded to the dtype of the keys.

Shapes: R ranks, B rows, S tokens of a row on a rank in two chunks of C, H query heads, G key-value heads, K head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.kernels.chunk_attention import Attended, AttentionKernel
from trainer.parallel.collectives import Group, start_all_gather, start_reduce_scatter


def context_attention(
    heads: tuple[Tensor, ...], cp: Group, *, scale: float | None, kernel: type[AttentionKernel]
) -> Tensor:
    """Causal attention to the keys and values of whole rows: [B, S, H, K].

    Args:
        heads: q, k and v of this rank's tokens. scale: of the scores; None: 1 / sqrt(K).
    """
    y_BSHK: Tensor = _ContextAttention.apply(*heads, cp, scale, kernel)
    return y_BSHK


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSHK: Tensor,
        k_BSGK: Tensor,
        v_BSGK: Tensor,
        cp: Group,
        scale: float | None,
        kernel: type[AttentionKernel],
    ) -> Tensor:
        pending = [start_all_gather(x.unsqueeze(0), cp) for x in (k_BSGK, v_BSGK)]
        q_BHSK, *own = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGK))
        y_BHSK, sums_BHS1, kept_own = kernel.forward((q_BHSK, *own), causal=True, scale=scale)
        gathered = [each.wait() for each in pending]
        kept_others = []
        for part in _parts(cp, q_BSHK.shape[1]):
            q, y, sums = (x[:, :, part.first :] for x in (q_BHSK, y_BHSK, sums_BHS1))
            other = kernel.forward((q, *map(part.heads, gathered)), causal=False, scale=scale)
            kernel.merge_(y, sums, other.y_BHSK, other.sums_BHS1)
            kept_others.append(other.kept)
        ctx.save_for_backward(q_BSHK, *gathered, y_BHSK, sums_BHS1)
        ctx.cp, ctx.scale, ctx.kernel, ctx.kept_own, ctx.kept_others = cp, scale, kernel, kept_own, kept_others
        return y_BHSK.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (q_BSHK, *gathered, y_BHSK, sums_BHS1), (dy_BSHK,) = ctx.saved_tensors, gradients
        cp, kernel, scale = ctx.cp, ctx.kernel, ctx.scale
        of_queries = (dy_BSHK.transpose(1, 2), q_BSHK.transpose(1, 2), y_BHSK, sums_BHS1)
        sent, of_parts = [torch.zeros_like(x) for x in gathered], []
        parts = _parts(cp, q_BSHK.shape[1])
        for part, kept in zip(parts, ctx.kept_others, strict=True):
            dy, q, y, sums = (x[:, :, part.first :] for x in of_queries)
            attended = Attended(y, sums.contiguous(), kept)
            heads = (q, *map(part.heads, gathered))
            dq, *found = kernel.backward(dy, heads, attended=attended, causal=False, scale=scale)
            of_parts.append(dq)
            for x_RBSGK, gradient in zip(sent, found, strict=True):
                part.set_(x_RBSGK, gradient)
        pending = [start_reduce_scatter(x, cp) for x in sent]

        dy, q, *_ = of_queries
        attended = Attended(y_BHSK, sums_BHS1, ctx.kept_own)
        heads = (q, *(x[cp.rank].transpose(1, 2) for x in gathered))
        dq_BHSK, *found = kernel.backward(dy, heads, attended=attended, causal=True, scale=scale)
        for part, dq in zip(parts, of_parts, strict=True):
            dq_BHSK[:, :, part.first :] += dq
        dk_BSGK, dv_BSGK = (x.transpose(1, 2) + y.wait()[0] for x, y in zip(found, pending, strict=True))
        return dq_BHSK.transpose(1, 2), dk_BSGK, dv_BSGK, None, None, None


class _Part(NamedTuple):
    """Tokens of other ranks, T of each, to all of which this rank's tokens from `first` on attend."""

    first: int
    ranks: slice
    tokens: slice

    def heads(self, x_RBSGK: Tensor) -> Tensor:
        """Keys or values of the part: [B, G, ranks * T, K], a view if there is one row."""
        return x_RBSGK[self.ranks, :, self.tokens].transpose(0, 1).flatten(1, 2).transpose(1, 2)

    def set_(self, x_RBSGK: Tensor, heads: Tensor) -> None:
        """Write what `heads` would return."""
        target = x_RBSGK[self.ranks, :, self.tokens].transpose(0, 1)
        target.copy_(heads.transpose(1, 2).unflatten(1, target.shape[1:3]))


def _parts(cp: Group, length: int) -> list[_Part]:
    """What a rank attends to of other ranks, which hold as many tokens of a row as it does."""
    half = length // 2
    lower = [_Part(0, slice(cp.rank), slice(half))] if cp.rank else []
    return lower + ([_Part(half, slice(cp.rank + 1, None), slice(None))] if cp.rank + 1 < cp.size else [])
