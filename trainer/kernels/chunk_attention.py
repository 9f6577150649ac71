"""Causal attention for a chunk of each row on cuDNN's kernels, for context parallelism.

cuDNN's fused attention has no causal mask for fewer queries than keys. So a chunk attends twice, to its own keys with a
mask and to the keys before it without one, and the two results are merged using the logarithms of their sums (Rabe and
Staats 2021; Liu et al. 2023). Backward gives each half the merged result and sum, so that its weights are those of the
whole softmax. What is unusual: it calls the operations that PyTorch uses below scaled_dot_product_attention, which does
not return the sums. Other dtypes, wider heads, deterministic runs, and GPUs for which PyTorch does not prefer cuDNN use
the implementation of plain.py.

`attention` has all keys; layers/context_attention.py attends to a rank's own keys while the others travel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.kernels import plain
from trainer.kernels.scores import WIDEST_CUDNN_HEAD

HOPPER, BLACKWELL = 9, 10  # compute capabilities for which PyTorch prefers cuDNN's attention


class Attended(NamedTuple):
    """The result of an attention kernel: y_BHSK, the logarithms of the softmax's sums [B, H, S, 1], and saved state."""

    y_BHSK: Tensor
    sums_BHS1: Tensor
    kept: tuple[Any, ...]


class AttentionKernel(Protocol):
    """A fused kernel, forward and backward, for [B, H, S, K] queries and [B, G, T, K] keys and values."""

    @staticmethod
    def fits(q: Tensor) -> bool:
        """Whether it takes queries of this dtype and width, on their device."""

    @staticmethod
    def forward(heads: Sequence[Tensor], *, causal: bool, scale: float | None) -> Attended:
        """Attention; `causal` requires as many queries as keys."""

    @staticmethod
    def backward(
        dy_BHSK: Tensor, heads: Sequence[Tensor], *, attended: Attended, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of queries, keys and values, given the result and sums of the whole softmax in `attended`."""

    @staticmethod
    def merge_(y_BHSK: Tensor, sums_BHS1: Tensor, other_BHSK: Tensor, other_sums_BHS1: Tensor) -> None:
        """See the function `merge_`."""


def merge_(y_BHSK: Tensor, sums_BHS1: Tensor, other_BHSK: Tensor, other_sums_BHS1: Tensor) -> None:
    """Turn results and sums into those of attending to the keys of another call, too."""
    share = torch.sigmoid(other_sums_BHS1 - sums_BHS1)  # of the other keys
    y_BHSK.copy_(torch.lerp(y_BHSK.to(share.dtype), other_BHSK.to(share.dtype), share))
    sums_BHS1.copy_(torch.logaddexp(sums_BHS1, other_sums_BHS1))


@functools.cache
def _compiled_merge_() -> Callable[..., None]:
    return torch.compile(merge_)


class CuDnn:
    """NVIDIA cuDNN's kernel, called through PyTorch's operations."""

    @staticmethod
    def fits(q: Tensor) -> bool:
        """Whether cuDNN's kernels take queries of this dtype and width, and are preferred on their GPU."""
        if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] > WIDEST_CUDNN_HEAD or not q.is_cuda:
            return False
        if torch.are_deterministic_algorithms_enabled() or not torch.backends.cuda.cudnn_sdp_enabled():
            return False
        return torch.cuda.get_device_capability(q.device)[0] in (HOPPER, BLACKWELL)

    @staticmethod
    def forward(heads: Sequence[Tensor], *, causal: bool, scale: float | None) -> Attended:
        """See AttentionKernel."""
        y, sums, *for_backward = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *heads, None, True, 0.0, causal, False, scale=scale
        )
        return Attended(y, sums, tuple(for_backward[:6]))

    @staticmethod
    def backward(
        dy_BHSK: Tensor, heads: Sequence[Tensor], *, attended: Attended, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See AttentionKernel."""
        queries, keys, most_queries, most_keys, seed, offset = attended.kept
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dy_BHSK, *heads, attended.y_BHSK, attended.sums_BHS1, seed, offset, None,
            queries, keys, most_queries, most_keys, 0.0, causal, scale=scale,
        )  # fmt: skip
        return dq, dk, dv

    @staticmethod
    def merge_(y_BHSK: Tensor, sums_BHS1: Tensor, other_BHSK: Tensor, other_sums_BHS1: Tensor) -> None:
        """See AttentionKernel."""
        _compiled_merge_()(y_BHSK, sums_BHS1, other_BHSK, other_sums_BHS1)


def attention(
    q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, scale: float | None = None, ends: tuple[int, ...] | None = None
) -> Tensor:
    """See plain.attention."""
    if ends is None or not CuDnn.fits(q_BSHK):
        return plain.attention(q_BSHK, k_BTGK, v_BTGK, scale, ends)
    return chunks_of_rows(q_BSHK, k_BTGK, v_BTGK, scale=scale, ends=ends, kernel=CuDnn)


def chunks_of_rows(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    *,
    scale: float | None,
    ends: tuple[int, ...],
    kernel: type[AttentionKernel],
) -> Tensor:
    """`attention` for chunks, with this kernel."""
    k_BGTK, v_BGTK = k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2)
    parts = [
        _ChunkAttention.apply(q.transpose(1, 2), k_BGTK[:, :, :end], v_BGTK[:, :, :end], scale, kernel).transpose(1, 2)
        for q, end in plain.query_chunks(q_BSHK, ends)
    ]
    return torch.cat(parts, dim=1)


class _ChunkAttention(torch.autograd.Function):
    """The last S of T tokens: [B, H, S, K] of queries, [B, G, T, K] of keys and values."""

    @staticmethod
    def forward(
        ctx: Any, q_BHSK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, scale: float | None, kernel: type[AttentionKernel]
    ) -> Tensor:
        before = k_BGTK.shape[2] - q_BHSK.shape[2]
        own_heads = (q_BHSK, k_BGTK[:, :, before:], v_BGTK[:, :, before:])
        y, sums, *for_backward = kernel.forward(own_heads, causal=True, scale=scale)
        if before:
            other = kernel.forward((q_BHSK, k_BGTK[:, :, :before], v_BGTK[:, :, :before]), causal=False, scale=scale)
            kernel.merge_(y, sums, other.y_BHSK, other.sums_BHS1)
            for_backward.append(other.kept)
        ctx.save_for_backward(q_BHSK, k_BGTK, v_BGTK, y, sums)
        ctx.before, ctx.scale, ctx.kernel, ctx.kept = before, scale, kernel, for_backward
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy_BHSK,) = gradients
        q, k, v, y, sums = ctx.saved_tensors
        before, scale, kernel = ctx.before, ctx.scale, ctx.kernel
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        heads = (q, k[:, :, before:], v[:, :, before:])
        attended = Attended(y, sums, ctx.kept[0])
        dq, dk[:, :, before:], dv[:, :, before:] = kernel.backward(
            dy_BHSK, heads, attended=attended, causal=True, scale=scale
        )
        if before:
            heads = (q, k[:, :, :before], v[:, :, :before])
            attended = Attended(y, sums, ctx.kept[1])
            more, dk[:, :, :before], dv[:, :, :before] = kernel.backward(
                dy_BHSK, heads, attended=attended, causal=False, scale=scale
            )
            dq = dq + more
        return dq, dk, dv, None, None
