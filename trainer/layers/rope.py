"""Rotary positions (Su et al. 2021): tables, and the split of one projection into rotated heads.

Pairs are (i, i + R/2) of a head's first R features, as in Llama, or (2i, 2i + 1). Angles are computed in fp64 and
stored as cosines and sines in at least fp32.

Shapes: B batch, S sequence, H query heads, G key-value heads, E heads of any kind, K head width, R rotated features.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.kernels.table import Kernels
from trainer.layers.shapes import RopeShape


class Rotation(NamedTuple):
    """cos and sin of the angle of each position and pair: [S, R / 2]; [B, S, R / 2] if rows have own positions."""

    cosine: Tensor
    sine: Tensor

    def at(self, positions: Tensor | slice) -> Rotation:
        """The rows of these positions, [B, S] or a range."""
        return Rotation(self.cosine[positions], self.sine[positions])


class Rotations(NamedTuple):
    """Those of the blocks that attend to all tokens, and of those with a window, which may have another base."""

    full: Rotation
    in_windows: Rotation

    def at(self, positions: Tensor | slice) -> Rotations:
        """The rows of these positions, [B, S] or a range."""
        full = self.full.at(positions)
        return Rotations(full, full if self.in_windows is self.full else self.in_windows.at(positions))


def rotation(
    sequence_length: int, head_dim: int, *, rope: RopeShape, dtype: torch.dtype, device: torch.device
) -> Rotation:
    """The table for positions 0 to S - 1, in the dtype in which heads are rotated (fp32 for half precision)."""
    position = torch.arange(sequence_length, dtype=torch.float64, device=device)
    angles = torch.outer(position, frequencies(rope, head_dim, sequence_length).to(device))
    wide, size = torch.promote_types(dtype, torch.float32), magnitude(rope)
    return Rotation((angles.cos() * size).to(wide), (angles.sin() * size).to(wide))


def rotated_features(rope: RopeShape, head_dim: int) -> int:
    """R: features of a head that are rotated."""
    return int(head_dim * rope.fraction)


def frequencies(rope: RopeShape, head_dim: int, sequence_length: int = 0) -> Tensor:
    """Radians a position of each pair, after scaling: fp64[R / 2].

    Args:
        sequence_length: tokens of a row, which decide between the two lists of longrope.
    """
    width = rotated_features(rope, head_dim)
    theta = rope.theta
    if rope.scaling == "ntk":  # the slowest pair is scaled by the full factor, the fastest not at all
        theta *= rope.factor ** (width / (width - 2))
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if rope.scaling == "linear":  # Chen et al. 2023
        return frequency / rope.factor
    if rope.scaling == "yarn":
        keep = _yarn_kept(rope, width)
        return frequency * keep + frequency / rope.factor * (1 - keep)
    if rope.scaling == "llama3":
        turns = rope.original_length * frequency / (2 * math.pi)
        keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return frequency * keep + frequency / rope.factor * (1 - keep)
    if rope.scaling == "longrope":  # Ding et al. 2024
        factors = rope.long_factors if sequence_length > rope.original_length else rope.short_factors
        return frequency / torch.tensor(factors, dtype=torch.float64)
    return frequency


def magnitude(rope: RopeShape) -> float:
    """The factor for rotated heads: 1, except for yarn (Peng et al. 2023, eq. 22) and longrope."""
    if rope.scaling == "longrope":
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_length))
    return rope.magnitude(rope.mscale) / rope.magnitude(rope.mscale_all_dim)


def _yarn_kept(rope: RopeShape, width: int) -> Tensor:
    """The part of each pair's frequency that is kept: 1 for fast pairs, 0 for slow ones, linear in between."""

    def pair(turns: float) -> float:
        """The pair that makes this many turns in the original length."""
        return width * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair(rope.beta_fast), pair(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, width - 1)
    line = (torch.arange(width // 2, dtype=torch.float64) - low) / ((high - low) or 1e-3)
    return 1 - line.clamp(0, 1)


def split_heads(
    qkv_BSEK: Tensor,
    rotation: Rotation | None,
    *,
    sizes: tuple[int, int, int],
    interleaved: bool = False,
    kernels: Kernels,
) -> tuple[Tensor, ...]:
    """q, k and v from E = H + 2G heads, q and k rotated: [B, S, H, K], [B, S, G, K], [B, S, G, K].

    Without a rotation they are views.
    """
    return _SplitHeads.apply(qkv_BSEK, rotation, sizes, interleaved, kernels)


def rotate(x_BSEK: Tensor, rotation: Rotation | None, *, interleaved: bool, kernels: Kernels) -> Tensor:
    """Heads rotated by the angles of their positions; unchanged without a rotation."""
    return x_BSEK if rotation is None else _Rotate.apply(x_BSEK, rotation, interleaved, kernels)


class _SplitHeads(torch.autograd.Function):
    """Forward: copies, so that the projection's output can be freed. Backward: rotate back, joined in one tensor."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv_BSEK: Tensor,
        rotation: Rotation | None,
        sizes: tuple[int, int, int],
        interleaved: bool,
        kernels: Kernels,
    ) -> tuple[Tensor, ...]:
        ctx.rotation, ctx.sizes, ctx.interleaved, ctx.kernels = rotation, sizes, interleaved, kernels
        if rotation is None:
            return qkv_BSEK.split(sizes, dim=2)
        return kernels.split_heads(qkv_BSEK, *rotation, *sizes[:2], interleaved)

    @staticmethod
    def backward(ctx: Any, dq_BSHK: Tensor, dk_BSGK: Tensor, dv_BSGK: Tensor) -> tuple[Tensor | None, ...]:
        batch, length, _, width = dq_BSHK.shape
        dqkv_BSEK = dq_BSHK.new_empty(batch, length, sum(ctx.sizes), width)
        parts = dqkv_BSEK.split(ctx.sizes, dim=2)
        ctx.kernels.join_heads_(parts, (dq_BSHK, dk_BSGK, dv_BSGK), ctx.rotation, ctx.interleaved)
        return dqkv_BSEK, None, None, None, None


class _Rotate(torch.autograd.Function):
    """Forward: rotate. Backward: rotate back; only the table is saved."""

    @staticmethod
    def forward(ctx: Any, x_BSEK: Tensor, rotation: Rotation, interleaved: bool, kernels: Kernels) -> Tensor:
        ctx.rotation, ctx.interleaved, ctx.kernels = rotation, interleaved, kernels
        return kernels.rotate(x_BSEK, *rotation, interleaved)

    @staticmethod
    def backward(ctx: Any, dy_BSEK: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.rotation
        return ctx.kernels.rotate(dy_BSEK, cosine, -sine, ctx.interleaved), None, None, None
