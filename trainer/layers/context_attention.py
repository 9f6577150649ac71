"""Causal attention of a rank's two chunks of each row, with communication beside computation.

Each chunk attends to its own keys while those of other ranks travel, then to the keys before it; the results are merged
(kernels/chunk_attention.py). Backward begins with the keys before, whose gradients travel to the ranks that they belong
to while those of own keys are computed. The gradient of a key is summed over ranks before that of its own chunk is
added; each sum is rounded to the dtype of the keys.

Shapes: B rows, S tokens of a row on this rank in two chunks of C, H query heads, G key-value heads, K head width. The
cp ranks hold 2 cp chunks of each row; a rank's later chunk attends to N chunks before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.kernels.chunk_attention import Attended, AttentionKernel
from trainer.parallel.collectives import Group, start_all_gather, start_reduce_scatter
from trainer.parallel.context import chunks_of, place_of


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
        numbers = chunks_of(cp.rank, cp.size)
        mine = torch.stack([x.unflatten(1, (2, -1)).transpose(0, 1) for x in (k_BSGK, v_BSGK)], dim=1)
        gathered = start_all_gather(mine, cp)
        heads = list(zip(*map(_chunks, (q_BSHK, k_BSGK, v_BSGK)), strict=True))
        own = [kernel.forward(of_chunk, causal=True, scale=scale) for of_chunk in heads]
        before = _in_order(gathered.wait(), cp.size, number=numbers[1])
        y_BSHK, sums, kept_before = q_BSHK.new_empty(q_BSHK.shape), [], []
        for number, (q, _, _), y, half in zip(numbers, heads, _chunks(y_BSHK), own, strict=True):
            if number == 0:
                y.copy_(half.y_BHSK)
                sums.append(half.sums_BHS1)
                kept_before.append(())
                continue
            other = kernel.forward((q, *_first(before, number)), causal=False, scale=scale)
            sums.append(kernel.merge_(y, half, other))
            kept_before.append(other.kept)
        ctx.save_for_backward(q_BSHK, k_BSGK, v_BSGK, before, y_BSHK, *sums)
        ctx.cp, ctx.scale, ctx.kernel = cp, scale, kernel
        ctx.kept_own, ctx.kept_before = [half.kept for half in own], kept_before
        return y_BSHK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (q_BSHK, k_BSGK, v_BSGK, before, y_BSHK, *sums), (dy_BSHK,) = ctx.saved_tensors, gradients
        cp, kernel, scale = ctx.cp, ctx.kernel, ctx.scale
        numbers, ys, dys = chunks_of(cp.rank, cp.size), _chunks(y_BSHK), _chunks(dy_BSHK)
        heads = list(zip(*map(_chunks, (q_BSHK, k_BSGK, v_BSGK)), strict=True))

        def half(i: int, keys: tuple[Tensor, ...], kept: tuple[Any, ...], *, causal: bool) -> tuple[Tensor, ...]:
            attended = Attended(ys[i], sums[i], kept)
            return kernel.backward(dys[i], (heads[i][0], *keys), attended=attended, causal=causal, scale=scale)

        dq_before: list[Tensor | None] = [None, None]
        dq_before[1], *of_before = half(1, _first(before, numbers[1]), ctx.kept_before[1], causal=False)
        if numbers[0]:
            dq_before[0], *earlier = half(0, _first(before, numbers[0]), ctx.kept_before[0], causal=False)
            for total, part in zip(of_before, earlier, strict=True):
                total[:, :, : part.shape[2]] += part
        scattered = start_reduce_scatter(_by_rank(of_before, cp.size, number=numbers[1]), cp)

        own = [half(i, heads[i][1:], ctx.kept_own[i], causal=True) for i in range(2)]
        dq_BSHK, dk_BSGK, dv_BSGK = (x.new_empty(x.shape) for x in (q_BSHK, k_BSGK, v_BSGK))
        for target, (part, _, _), more in zip(_chunks(dq_BSHK), own, dq_before, strict=True):
            _ = target.copy_(part) if more is None else torch.add(part, more, out=target)
        targets = zip(_chunks(dk_BSGK), _chunks(dv_BSGK), strict=True)
        for of_chunk, (_, *found), arrived in zip(targets, own, scattered.wait(), strict=True):
            for target, part, more in zip(of_chunk, found, arrived, strict=True):
                torch.add(part, more.transpose(1, 2), out=target)
        return dq_BSHK, dk_BSGK, dv_BSGK, None, None, None


def _chunks(x_BSHK: Tensor) -> tuple[Tensor, ...]:
    """Both chunks as kernels see them: views [B, H, C, K]."""
    return tuple(x.transpose(1, 2) for x in x_BSHK.chunk(2, dim=1))


def _first(before: Tensor, number: int) -> tuple[Tensor, ...]:
    """Keys and values of the chunks before this one, of [2, B, N, C, G, K]: views [B, G, number * C, K]."""
    return tuple(x.flatten(1, 2).transpose(1, 2) for x in before[:, :, :number])


def _in_order(gathered: Tensor, size: int, *, number: int) -> Tensor:
    """The chunks before this one in the order of rows, of [2 cp, 2, B, C, G, K]: [2, B, N, C, G, K]."""
    return torch.stack([gathered[place_of(each, size)] for each in range(number)], dim=2)


def _by_rank(of_before: Sequence[Tensor], size: int, *, number: int) -> Tensor:
    """Gradients of keys and of values [B, G, N * C, K] where `_in_order` took these, 0 in the other chunks."""
    parts = [x.transpose(1, 2).unflatten(1, (number, -1)).unbind(1) for x in of_before]
    sent = parts[0][0].new_empty((2 * size, 2, *parts[0][0].shape))
    for each in range(2 * size):
        for target, of_chunks in zip(sent[place_of(each, size)], parts, strict=True):
            _ = target.copy_(of_chunks[each]) if each < number else target.zero_()
    return sent
