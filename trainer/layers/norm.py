"""Norms, fused with the addition before them, and norms of the heads of queries and keys.

A block's norm first adds the output of the previous block to the residual stream, so that the stream is read and
written once. Statistics, the product with the weight and the weight's gradient are computed in at least fp32.

Shapes: N tokens, D hidden, E heads of any kind on this rank, K head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.kernels.table import Kernels
from trainer.layers.base import Layer, add_vector
from trainer.layers.shapes import NormShape
from trainer.parallel.collectives import Group, all_reduce_


class Norm(Layer):
    """RMSNorm (Zhang and Sennrich 2019) or LayerNorm (Ba et al. 2016) of a sum."""

    def __init__(self, width: int, shape: NormShape, *, kernels: Kernels) -> None:
        super().__init__()
        self.shape, self.kernels, self.is_layernorm = shape, kernels, shape.kind == "layernorm"
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if self.is_layernorm and shape.bias else None

    def forward(self, x_ND: Tensor, branch_ND: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x + branch, norm(x + branch)); without a branch (x, norm(x))."""
        return _Norm.apply(x_ND, branch_ND, self.weight, self.bias, self)

    def again(self, sum_ND: Tensor) -> Tensor:
        """Recompute the norm of a sum that `forward` returned, bitwise equal to the one it returned."""
        return self.run(sum_ND, None)[1]

    def run(self, x_ND: Tensor, branch_ND: Tensor | None) -> tuple[Tensor, ...]:
        """What the kernel gives: the sum, its norm and the statistics."""
        weight_D = self.factor()
        bias_D: Tensor | None = self.bias
        if bias_D is None and self.is_layernorm:
            bias_D = torch.zeros_like(weight_D)
        run = self.kernels.layer_norm if self.is_layernorm else self.kernels.rms_norm
        return run(x_ND, branch_ND, weight_D, bias_D, self.shape.epsilon)

    def factor(self) -> Tensor:
        """What the unit is multiplied by; 1 + weight is not rounded to the weight's dtype."""
        if not self.shape.zero_centered:
            return self.weight.detach()
        return self.weight.detach().to(torch.promote_types(self.weight.dtype, torch.float32)) + 1


class HeadsNorm(Layer):
    """RMSNorm, or LayerNorm without bias, of a token's heads: of all of them together, or each with its own weights.

    Ranks of tp have different heads, so a mean over all heads is summed over tp. Where ranks hold copies of heads, each
    head has equally many, and the mean over all ranks' elements is that over the heads.

    Args:
        heads: on this rank. width: K. tp: the ranks whose heads are normalized together; None: each head alone.
    """

    def __init__(self, heads: int, width: int, shape: NormShape, *, tp: Group | None) -> None:
        super().__init__()
        self.shape, self.heads, self.tp = shape, heads, tp
        self.weight = nn.Parameter(torch.empty(heads * width))

    def forward(self, x_NEK: Tensor) -> Tensor:
        return _HeadsNorm.apply(x_NEK, self.weight, self)

    def factor(self) -> Tensor:
        """What the unit is multiplied by, in at least fp32: [E, K]."""
        wide = self.weight.detach().to(torch.promote_types(self.weight.dtype, torch.float32))
        return (wide + 1 if self.shape.zero_centered else wide).view(self.heads, -1)

    def mean(self, x_NEK: Tensor) -> Tensor:
        """Over what is normalized together: [N, E or 1, 1]."""
        if self.tp is None:
            return x_NEK.mean(-1, keepdim=True)
        return all_reduce_(x_NEK.mean((-2, -1), keepdim=True), self.tp) / self.tp.size


class _HeadsNorm(torch.autograd.Function):
    """Backward: as of a norm, with means over the ranks; the weight's gradient is that of this rank's heads."""

    @staticmethod
    def forward(ctx: Any, x_NEK: Tensor, weight: Tensor, layer: HeadsNorm) -> Tensor:
        factor_EK = layer.factor()
        wide_NEK, centre = x_NEK.to(factor_EK.dtype), None
        if layer.shape.kind == "layernorm":
            centre = layer.mean(wide_NEK)
            wide_NEK = wide_NEK - centre
        scale = (layer.mean(wide_NEK.square()) + layer.shape.epsilon).rsqrt()
        ctx.save_for_backward(x_NEK, centre, scale)
        ctx.layer, ctx.dtype = layer, weight.dtype
        return (wide_NEK * scale * factor_EK).to(x_NEK.dtype)

    @staticmethod
    def backward(ctx: Any, dy_NEK: Tensor) -> tuple[Tensor | None, ...]:
        x_NEK, centre, scale = ctx.saved_tensors
        layer, factor_EK = ctx.layer, ctx.layer.factor()
        wide_NEK, dy = x_NEK.to(factor_EK.dtype), dy_NEK.to(factor_EK.dtype)
        unit_NEK = (wide_NEK if centre is None else wide_NEK - centre) * scale
        g_NEK = dy * factor_EK
        dx_NEK = g_NEK - unit_NEK * layer.mean(g_NEK * unit_NEK)
        if centre is not None:
            dx_NEK -= layer.mean(g_NEK)
        main, gradient = layer.main_gradients, (dy * unit_NEK).sum(0).flatten()
        dweight = add_vector(main, "weight", gradient, dtype=ctx.dtype)
        return (scale * dx_NEK).to(x_NEK.dtype), dweight, None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, branch_ND: Tensor | None, weight_D: Tensor, bias_D: Tensor | None, layer: Norm
    ) -> tuple[Tensor, Tensor]:
        sum_ND, y_ND, *statistics = layer.run(x_ND, branch_ND)
        sum_ND = x_ND if branch_ND is None else sum_ND
        ctx.save_for_backward(sum_ND, weight_D, *statistics)
        ctx.layer, ctx.joined = layer, branch_ND is not None
        ctx.set_materialize_grads(False)  # the stream after the last norm is not used
        return (x_ND.view_as(x_ND) if branch_ND is None else sum_ND), y_ND

    @staticmethod
    def backward(ctx: Any, dsum_ND: Tensor | None, dy_ND: Tensor) -> tuple[Tensor | None, ...]:
        sum_ND, weight_D, *statistics = ctx.saved_tensors
        layer, main = ctx.layer, ctx.layer.main_gradients
        run = layer.kernels.layer_norm_backward if layer.is_layernorm else layer.kernels.rms_norm_backward
        dx_ND, dweight_D, dbias_D = run(dsum_ND, dy_ND, sum_ND, layer.factor(), *statistics)
        dweight = add_vector(main, "weight", dweight_D, dtype=weight_D.dtype)
        dbias = None if layer.bias is None else add_vector(main, "bias", dbias_D, dtype=weight_D.dtype)
        return dx_ND, dx_ND if ctx.joined else None, dweight, dbias, None
