"""Feed-forward: gated (Shazeer 2020) with gate and up in one product, or with one of the plain nonlinearities.

Shapes: N tokens, D hidden, F local feed-forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.kernels.table import Kernels
from trainer.layers.base import Layer, Parallel
from trainer.layers.linear import Linear
from trainer.layers.recompute import recomputed
from trainer.layers.shapes import GATED, MLPShape


class MLP(Layer):
    """D -> F (or 2F) -> D."""

    def __init__(self, shape: MLPShape, parallel: Parallel, *, kernels: Kernels) -> None:
        super().__init__()
        width, inner = shape.width, shape.inner // parallel.tp.size
        self.shape, self.kernels = shape, kernels
        outputs = inner * (2 if shape.activation in GATED else 1)
        self.up = Linear(width, outputs, parallel=parallel, bias=shape.bias, column=True)
        self.down = Linear(inner, width, parallel=parallel, bias=shape.bias, column=False)

    def forward(self, x_ND: Tensor, *, recompute: bool = False) -> Tensor:
        """With `recompute`, the nonlinearity's output is not saved for backward, but recomputed."""
        up_NF = self.up(x_ND)
        y_NF = self.activated(up_NF)
        if not recompute:
            return self.down(y_NF)
        with recomputed(y_NF, lambda: self.activated(up_NF.detach())):
            return self.down(y_NF)

    def activated(self, up_NF: Tensor) -> Tensor:
        """[N, F] of the first projection's [N, F] or [N, 2F]."""
        return activated(up_NF, self.shape, self.kernels)


def is_swiglu(shape: MLPShape) -> bool:
    """Whether the nonlinearity is plain SwiGLU."""
    return shape.activation == "swiglu" and not (shape.clamp or shape.offset)


def activated(up_NF: Tensor, shape: MLPShape, kernels: Kernels) -> Tensor:
    """The nonlinearity of a feed-forward layer: [N, F] of [N, F] or [N, 2F]."""
    if shape.activation in ("relu", "squared_relu"):  # So et al. 2021 for the second
        return _ReLU.apply(up_NF, shape.activation == "squared_relu")
    if shape.activation not in GATED:
        return F.gelu(up_NF, approximate="none" if shape.activation == "gelu_erf" else "tanh")
    if is_swiglu(shape):
        return _SwiGLU.apply(up_NF, kernels)
    return _Gated.apply(up_NF, kernels, (shape.activation, shape.clamp, shape.offset))


class _ReLU(torch.autograd.Function):
    """max(0, x), optionally squared; saves its input, so that the output can be recomputed."""

    @staticmethod
    def forward(ctx: Any, x_NF: Tensor, squared: bool) -> Tensor:
        ctx.save_for_backward(x_NF)
        ctx.squared = squared
        y_NF = F.relu(x_NF)
        return y_NF.square() if squared else y_NF

    @staticmethod
    def backward(ctx: Any, dy_NF: Tensor) -> tuple[Tensor, None]:
        (x_NF,) = ctx.saved_tensors
        if ctx.squared:
            return dy_NF * (2 * F.relu(x_NF)), None
        return torch.ops.aten.threshold_backward(dy_NF, x_NF, 0), None  # one kernel: dy where x > 0


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


class _Gated(torch.autograd.Function):
    """Any other gate; see kernels.plain.gated."""

    @staticmethod
    def forward(ctx: Any, both_NF: Tensor, kernels: Kernels, how: tuple[str, float, float]) -> Tensor:
        ctx.save_for_backward(both_NF)
        ctx.kernels, ctx.how = kernels, how
        return kernels.gated(both_NF, how)

    @staticmethod
    def backward(ctx: Any, dy_NF: Tensor) -> tuple[Tensor, None, None]:
        (both_NF,) = ctx.saved_tensors
        dboth_NF = torch.empty_like(both_NF)
        ctx.kernels.gated_backward_(*dboth_NF.chunk(2, dim=-1), dy_NF, *both_NF.chunk(2, dim=-1), ctx.how)
        return dboth_NF, None, None
