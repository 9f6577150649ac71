"""Attention with learned biases on a GPU: neither scores nor their gradients are held, and the biases' gradient is a
sum over rows in a fixed order (biased_triton.py). The twin is plain.scored_attention.

Shapes: B rows, S queries, T keys, H heads, K head width.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from trainer.kernels import plain
from trainer.kernels.plain import ScoreTensors
from trainer.kernels.scores import ScoreShape
from trainer.kernels.self_test import refusals

WIDTHS = (16, 32, 64, 128)  # of heads
BLOCK = 64  # queries and keys of a program
TYPES = (torch.bfloat16, torch.float16)
TOLERANCE = 2e-2  # of the self-test, in 16 bits


def biased_attention(
    q_BSHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, scores: ScoreShape, tensors: ScoreTensors
) -> Tensor:
    """See plain.scored_attention; of options only biases, lengths and causality.

    Queries behind the length of a row that is its own keys are padding, whose output is 0.
    """
    y_BSHK: Tensor = _Biased.apply(q_BSHK, k_BTHK, v_BTHK, tensors.bias_HST, tensors.length_B, scores)
    return y_BSHK


def takes(q_BSHK: Tensor, k_BTGK: Tensor, tensors: ScoreTensors) -> bool:
    """Whether the kernels work on this device, and with heads of this width and number."""
    has_bias = tensors.bias_HST is not None and tensors.keep_BHST is None
    return has_bias and q_BSHK.shape[2] == k_BTGK.shape[2] and works(q_BSHK.device, q_BSHK.dtype, q_BSHK.shape[3])


class _Biased(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias_HST: Tensor, length_B: Tensor | None, scores: ScoreShape
    ) -> Tensor:
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        bias_HST, (batch, queries, heads, width), keys = bias_HST.contiguous(), q.shape, k.shape[1]
        y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        log_sum = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
        blocks = {"BLOCK_M": BLOCK, "BLOCK_N": BLOCK, "WIDTH": width, "CAUSAL": scores.causal}
        ctx.constants = blocks | {"LENGTHS": length_B is not None, "OF_ROWS": length_B is not None and queries == keys}
        ctx.sizes, ctx.scale = (heads, queries, keys), scores.factor(width)
        ctx.save_for_backward(q, k, v, bias_HST, length_B, y, log_sum)
        _kernels().forward[(_blocks(queries), batch * heads)](
            q, k, v, bias_HST, length_B, y, log_sum, *map(_strides, (q, k, v)), *ctx.sizes, ctx.scale, **ctx.constants
        )
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias_HST, length_B, y, log_sum = ctx.saved_tensors
        dy = dy if dy.stride(3) == 1 else dy.contiguous()
        batch, (heads, queries, keys) = len(q), ctx.sizes
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        strides, delta = tuple(map(_strides, (q, k, v, dy))), torch.empty_like(log_sum)
        how, kernels = (*strides, *ctx.sizes, ctx.scale), _kernels()
        kernels.query_gradient[(_blocks(queries), batch * heads)](
            q, k, v, bias_HST, length_B, y, dy, log_sum, delta, dq, *how, **ctx.constants
        )
        given = (q, k, v, bias_HST, length_B, dy, log_sum, delta)
        kernels.key_gradients[(_blocks(keys), batch * heads)](*given, dk, dv, *how, **ctx.constants)
        dbias_HST = None
        if ctx.needs_input_grad[3]:
            dbias_HST = torch.empty_like(bias_HST)
            kernels.bias_gradient[(_blocks(keys), _blocks(queries), heads)](
                *given, dbias_HST, *strides, batch, *ctx.sizes, ctx.scale, **ctx.constants
            )
        return dq, dk, dv, dbias_HST, None, None


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def _strides(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


@functools.cache
def works(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the kernels compile on the device, and compute on it what plain.scored_attention does."""
    if device.type != "cuda" or dtype not in TYPES or width not in WIDTHS or _kernels() is None:
        return False
    try:
        return differs_by(device, dtype, width) <= TOLERANCE
    except refusals():  # wide heads need more shared memory than there is
        return False


@torch.inference_mode(False)
@torch.enable_grad()
def differs_by(device: torch.device, dtype: torch.dtype, width: int, tokens: int = 2 * BLOCK + 10) -> float:
    """The largest ||ours - plain|| / ||plain|| of the output and the gradients, of real tokens; both directions.

    Also where a run's first pass is one without gradients.
    """
    generator = torch.Generator().manual_seed(1)
    of_heads = [torch.randn(3, tokens, 2, width, generator=generator).to(device, dtype) for _ in range(4)]
    bias_HST, worst = torch.randn(2, tokens, tokens, generator=generator).to(device), 0.0
    length = torch.tensor([tokens, 5, BLOCK], dtype=torch.int32, device=device)
    for causal in (False, True):
        length_B, dy = None if causal else length, of_heads[3]
        scores = ScoreShape(scale=0.2, causal=causal, relative=True)
        results: list[list[Tensor]] = []
        if length_B is not None:
            dy = dy * (torch.arange(tokens, device=device) < length_B[:, None])[..., None, None]
        for attend, wide in ((biased_attention, dtype), (plain.scored_attention, torch.float32)):
            q, k, v = (x.to(wide, copy=True).requires_grad_() for x in of_heads[:3])
            given = [q, k, v, bias_HST.clone().requires_grad_()]
            y = attend(q, k, v, scores, ScoreTensors(bias_HST=given[3], length_B=length_B))
            real = y.detach() * (dy != 0)
            results.append([real, *torch.autograd.grad(y, given, dy.to(y.dtype))])
        errors = [(a.double() - b.double()).norm() / b.double().norm() for a, b in zip(*results, strict=True)]
        worst = max(worst, *map(float, errors))
    return worst


@functools.cache
def _kernels() -> Any:
    """Compiled when they are first called; None without Triton."""
    try:
        from trainer.kernels import biased_triton
    except ImportError:
        return None
    return biased_triton
