"""Linear layers with their own backward pass.

Column-parallel: the outputs are divided over tp. Row-parallel: the inputs are, and the ranks' results are summed
(Shoeybi et al. 2019, "Megatron-LM"). One autograd function serves both, because each is the other's backward. It saves
only this rank's part of the input and gathers it again; in backward the communication of the input's gradient overlaps
with the weight's product, which is added directly into the main gradient.

Shapes: N tokens, I inputs and O outputs of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.layers.base import Layer, MainGradients, Parallel, add_bias_gradient, add_weight_gradient
from trainer.layers.float8_scaling import LayerScaling
from trainer.layers.linear_float8 import float8_linear


class Linear(Layer):
    """This rank's part of y = x W^T + b.

    Args:
        inputs, outputs: local widths.
        parallel: the tensor-parallel axis. bias: whether there is one.
        column: whether the outputs are divided over tp (otherwise the inputs).

    Attributes:
        float8: how its products are computed in FP8; None: in the dtype of the weight.
    """

    def __init__(self, inputs: int, outputs: int, *, parallel: Parallel, bias: bool, column: bool) -> None:
        super().__init__()
        self.parallel, self.column = parallel, column
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.float8: LayerScaling | None = None

    def prepare(self) -> None:
        """Round the weight to FP8 if it has changed since it was last rounded."""
        if self.float8 is not None:
            self.float8.keep_weight(self.weight)

    def forward(self, x_NI: Tensor) -> Tensor:
        if self.float8 is not None:
            return float8_linear(
                x_NI,
                self.weight,
                bias_O=self.bias,
                main=self.main_gradients,
                parallel=self.parallel,
                column=self.column,
                scaling=self.float8,
            )
        apply = _Column.apply if self.column else _Row.apply
        return apply(x_NI, self.weight, self.bias, self.parallel, self.main_gradients)


def column_product(x_ND: Tensor, layer: Layer, *, weight: Tensor, parallel: Parallel) -> Tensor:
    """x W^T with a weight of another layer, such as the embedding's: [N, D] -> [N all tokens, rows of the weight]."""
    return _Column.apply(x_ND, weight, None, parallel, layer.main_gradients)


class _Column(torch.autograd.Function):
    """Forward: gather, multiply. Backward: multiply and reduce, overlapped with the weight's product."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, parallel: Parallel, main: MainGradients
    ) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.parallel, ctx.main, ctx.bias = parallel, main, bias_O is not None
        return parallel.gather_linear(x_NI, weight_OI, bias_O=bias_O)

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        whole = ctx.parallel.start_gather(x_NI)
        dx = ctx.parallel.start_product_reduce(dy_NO, weight_OI)
        dweight = add_weight_gradient(ctx.main, "weight", dy_NO=dy_NO, x_NI=whole.wait())
        dbias = add_bias_gradient(ctx.main, dy_NO) if ctx.bias else None
        return dx.wait(), dweight, dbias, None, None


class _Row(torch.autograd.Function):
    """Forward: multiply, reduce; the bias is added once, to the sum. Backward: gather, multiply."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, parallel: Parallel, main: MainGradients
    ) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.parallel, ctx.main, ctx.bias = parallel, main, bias_O is not None
        if parallel.tp.size == 1:
            return F.linear(x_NI, weight_OI, bias_O)
        y_NO = parallel.linear_reduce(x_NI, weight_OI)
        return y_NO if bias_O is None else y_NO.add_(bias_O)

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        products = ctx.parallel.start_gather_product(dy_NO, weight_OI)
        dbias = add_bias_gradient(ctx.main, dy_NO) if ctx.bias else None
        whole_NO, dx_NI = products()
        return dx_NI, add_weight_gradient(ctx.main, "weight", dy_NO=whole_NO, x_NI=x_NI), dbias, None, None
