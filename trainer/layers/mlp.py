"""Feed-forward: SwiGLU (Shazeer 2020) with gate and up in one product, or GELU, exact or by tanh (as GPT-2).

Shapes: N tokens, D hidden, F local feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.kernels.table import Kernels
from trainer.layers.base import Layer, Parallel
from trainer.layers.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPShape:
    """Sizes and choices of one feed-forward layer, over all ranks.

    Args:
        width: D. inner: F. activation: "swiglu", "gelu" (by tanh) or "gelu_erf". bias: of both projections.
    """

    width: int
    inner: int
    activation: str
    bias: bool


class MLP(Layer):
    """D -> F (or 2F) -> D."""

    def __init__(self, shape: MLPShape, parallel: Parallel, *, kernels: Kernels) -> None:
        super().__init__()
        width, inner = shape.width, shape.inner // parallel.tp.size
        self.gated, self.kernels = shape.activation == "swiglu", kernels
        self.approximation = "none" if shape.activation == "gelu_erf" else "tanh"
        self.up = Linear(width, inner * (2 if self.gated else 1), parallel=parallel, bias=shape.bias, column=True)
        self.down = Linear(inner, width, parallel=parallel, bias=shape.bias, column=False)

    def forward(self, x_ND: Tensor) -> Tensor:
        up = self.up(x_ND)
        return self.down(_SwiGLU.apply(up, self.kernels) if self.gated else F.gelu(up, approximate=self.approximation))


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up of [N, 2F], gate first."""

    @staticmethod
    def forward(ctx: Any, both_NF: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(both_NF)
        ctx.kernels = kernels
        return kernels.swiglu(both_NF)

    @staticmethod
    def backward(ctx: Any, dy_NF: Tensor) -> tuple[Tensor, None]:
        (both_NF,) = ctx.saved_tensors
        dboth_NF = torch.empty_like(both_NF)
        ctx.kernels.swiglu_backward_(*dboth_NF.chunk(2, dim=-1), dy_NF, *both_NF.chunk(2, dim=-1))
        return dboth_NF, None
