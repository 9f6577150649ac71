"""Causal self-attention with H query heads over G key-value heads (Ainslie et al. 2023 for G < H).

Shapes: B batch, S sequence, N = B * S tokens, D hidden, H and G local heads, K head width.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trainer.kernels.table import Kernels
from trainer.layers.base import Layer, Parallel
from trainer.layers.linear import Linear
from trainer.layers.rope import Rotation, split_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Sizes and choices of one attention layer, over all ranks.

    Args:
        width: D. bias: of both projections.
    """

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool


@dataclass(frozen=True, slots=True)
class Sequences:
    """How the tokens [N] of a microbatch are rows: B of S tokens each.

    Args:
        rotation: of positions 0 to S - 1; None for a model without rotary positions.
    """

    batch: int
    length: int
    rotation: Rotation | None


class Attention(Layer):
    """One projection for q, k and v, attention, one projection back."""

    def __init__(self, shape: AttentionShape, parallel: Parallel, *, kernels: Kernels) -> None:
        super().__init__()
        tp, width, self.head_dim = parallel.tp.size, shape.width, shape.head_dim
        heads, groups = shape.num_heads // tp, shape.num_kv_heads // tp
        self.sizes, self.kernels = (heads, groups, groups), kernels
        inner, outputs = heads * self.head_dim, sum(self.sizes) * self.head_dim
        self.qkv = Linear(width, outputs, parallel=parallel, bias=shape.bias, column=True)
        self.out = Linear(inner, width, parallel=parallel, bias=shape.bias, column=False)

    def forward(self, x_ND: Tensor, sequences: Sequences) -> Tensor:
        qkv = self.qkv(x_ND).view(sequences.batch, sequences.length, sum(self.sizes), self.head_dim)
        q_BSHK, k_BSGK, v_BSGK = split_heads(qkv, sequences.rotation, sizes=self.sizes, kernels=self.kernels)
        y_BSHK = self.kernels.attention(q_BSHK, k_BSGK, v_BSGK)
        return self.out(y_BSHK.flatten(0, 1).flatten(1))
