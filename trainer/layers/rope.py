"""Rotary positions (Su et al. 2021): tables, and the split of one projection into rotated heads.

Pairs are (i, i + K/2) of a head, as Llama has them. Angles are computed in fp64 and kept as cosines and sines in at
least fp32.

Shapes: B batch, S sequence, H query heads, G key-value heads, K head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.kernels.table import Kernels


class Rotation(NamedTuple):
    """cos and sin of the angle of each position and pair: [S, K / 2]."""

    cosine: Tensor
    sine: Tensor


def rotation(
    sequence_length: int, head_dim: int, *, theta: float, dtype: torch.dtype, device: torch.device
) -> Rotation:
    """The table for positions 0 to S - 1, in the dtype in which heads are rotated (fp32 for half precision)."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    position = torch.arange(sequence_length, dtype=torch.float64, device=device)
    angles = torch.outer(position, frequency)
    wide = torch.promote_types(dtype, torch.float32)
    return Rotation(angles.cos().to(wide), angles.sin().to(wide))


def split_heads(
    qkv_BSEK: Tensor, rotation: Rotation | None, *, sizes: tuple[int, int, int], kernels: Kernels
) -> tuple[Tensor, ...]:
    """q, k and v from E = H + 2G heads, q and k rotated: [B, S, H, K], [B, S, G, K], [B, S, G, K].

    Without a rotation they are views.
    """
    return _SplitHeads.apply(qkv_BSEK, rotation, sizes, kernels)


class _SplitHeads(torch.autograd.Function):
    """Forward: copies, so that the projection's output can be let go. Backward: rotate back, joined in one tensor."""

    @staticmethod
    def forward(
        ctx: Any, qkv_BSEK: Tensor, rotation: Rotation | None, sizes: tuple[int, int, int], kernels: Kernels
    ) -> tuple[Tensor, ...]:
        ctx.rotation, ctx.sizes, ctx.kernels = rotation, sizes, kernels
        if rotation is None:
            return qkv_BSEK.split(sizes, dim=2)
        return kernels.split_heads(qkv_BSEK, *rotation, *sizes[:2])

    @staticmethod
    def backward(ctx: Any, dq_BSHK: Tensor, dk_BSGK: Tensor, dv_BSGK: Tensor) -> tuple[Tensor | None, ...]:
        batch, length, _, width = dq_BSHK.shape
        dqkv_BSEK = dq_BSHK.new_empty(batch, length, sum(ctx.sizes), width)
        parts = dqkv_BSEK.split(ctx.sizes, dim=2)
        ctx.kernels.join_heads_(parts, (dq_BSHK, dk_BSGK, dv_BSGK), ctx.rotation)
        return dqkv_BSEK, None, None, None
