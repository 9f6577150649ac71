"""Norms, fused with the addition before them.

A block's norm first adds the output of the previous block to the residual stream, so that the stream is read and
written once. Statistics, the product with the weight and the weight's gradient are computed in at least fp32.

Shapes: N tokens, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.kernels.table import Kernels
from trainer.layers.base import Layer, add_vector


class Norm(Layer):
    """RMSNorm (Zhang and Sennrich 2019) or LayerNorm (Ba et al. 2016) of a sum.

    Args:
        width: D. kind: "rmsnorm" or "layernorm". epsilon: added to the mean square or the variance.
    """

    def __init__(self, width: int, *, kind: str, epsilon: float, kernels: Kernels) -> None:
        super().__init__()
        self.epsilon, self.kernels = epsilon, kernels
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if kind == "layernorm" else None

    def forward(self, x_ND: Tensor, branch_ND: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(x + branch, norm(x + branch)); without a branch (x, norm(x))."""
        return _Norm.apply(x_ND, branch_ND, self.weight, self.bias, self)

    def again(self, sum_ND: Tensor) -> Tensor:
        """Recompute the norm of a sum that `forward` returned, bitwise equal to the one it returned."""
        run = self.kernels.rms_norm if self.bias is None else self.kernels.layer_norm
        return run(sum_ND, None, self.weight, self.bias, self.epsilon)[1]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, branch_ND: Tensor | None, weight_D: Tensor, bias_D: Tensor | None, layer: Norm
    ) -> tuple[Tensor, Tensor]:
        run = layer.kernels.rms_norm if bias_D is None else layer.kernels.layer_norm
        sum_ND, y_ND, *statistics = run(x_ND, branch_ND, weight_D, bias_D, layer.epsilon)
        sum_ND = x_ND if branch_ND is None else sum_ND
        ctx.save_for_backward(sum_ND, weight_D, *statistics)
        ctx.layer, ctx.joined = layer, branch_ND is not None
        ctx.set_materialize_grads(False)  # the stream after the last norm is not used
        return (x_ND.view_as(x_ND) if branch_ND is None else sum_ND), y_ND

    @staticmethod
    def backward(ctx: Any, dsum_ND: Tensor | None, dy_ND: Tensor) -> tuple[Tensor | None, ...]:
        sum_ND, weight_D, *statistics = ctx.saved_tensors
        layer, main = ctx.layer, ctx.layer.main_gradients
        run = layer.kernels.rms_norm_backward if layer.bias is None else layer.kernels.layer_norm_backward
        dx_ND, dweight_D, dbias_D = run(dsum_ND, dy_ND, sum_ND, weight_D, *statistics)
        dweight = add_vector(main.get("weight"), dweight_D, dtype=weight_D.dtype)
        dbias = None if layer.bias is None else add_vector(main.get("bias"), dbias_D, dtype=weight_D.dtype)
        return dx_ND, dx_ND if ctx.joined else None, dweight, dbias, None
