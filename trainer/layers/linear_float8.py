"""The matrix products of a linear layer in FP8: y = x W^T, and in backward those for the input and for the weight.

Communication, biases and results stay in the dtype of the activations, and the weight's gradient is added directly into
the fp32 main gradient. Saved for backward is the transpose of the rounded input, half the bytes of the input itself;
under sequence parallelism it is this rank's part of the unrounded input, which is gathered and rounded again.

Shapes: N tokens, I inputs and O outputs of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.kernels.float8 import Factor
from trainer.layers.base import MainGradients, Parallel, add_bias_gradient
from trainer.layers.float8_scaling import LayerScaling


def float8_linear(
    x_NI: Tensor,
    weight_OI: Tensor,
    *,
    bias_O: Tensor | None,
    main: MainGradients,
    parallel: Parallel,
    column: bool,
    scaling: LayerScaling,
) -> Tensor:
    """x W^T + b of one rank; see layers/linear.py for column and row."""
    how = _How(main, parallel, column, scaling, record=torch.is_grad_enabled())
    return _Float8Linear.apply(x_NI, weight_OI, bias_O, how)


class _How(NamedTuple):
    """`record`: whether the largest values of this pass count."""

    main: MainGradients
    parallel: Parallel
    column: bool
    scaling: LayerScaling
    record: bool


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, how: _How) -> Tensor:
        _, parallel, column, scaling, record = how
        product = scaling.model.kernels.product
        # Rounded again if that needs no memory: another layer keeps the input, or only a part of it is held.
        again = scaling.model.recipe.input_again or (column and parallel.sequence_parallel)
        whole_NI = parallel.gather(x_NI) if column else x_NI
        x8, w8 = scaling.input(whole_NI, record=record, columns=not again), scaling.weight(weight_OI)
        alone = column or parallel.tp.size == 1
        y_NO = product(
            Factor(x8.rows_RC, x8.inverse_1),
            Factor(w8.rows_RC, w8.inverse_1),
            dtype=x_NI.dtype,
            bias_N=bias_O if alone else None,
            fast=True,
        )
        kept = (x_NI, None) if again else (x8.columns_CR, x8.inverse_1)
        ctx.save_for_backward(*kept, w8.columns_CR, w8.inverse_1)
        ctx.how, ctx.bias, ctx.dtype = how, bias_O is not None, weight_OI.dtype
        if alone:
            return y_NO
        y_NO = parallel.reduce(y_NO)
        return y_NO if bias_O is None else y_NO.add_(bias_O)

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        kept, kept_inverse_1, columns_IO, inverse_1 = ctx.saved_tensors
        main, parallel, column, scaling, _ = ctx.how
        product, again = scaling.model.kernels.product, kept_inverse_1 is None
        gathered = parallel.start_gather(kept) if again and column else None
        dbias = add_bias_gradient(main, dy_NO) if ctx.bias else None
        g8 = scaling.gradient(dy_NO if column else parallel.gather(dy_NO))
        dx_NI = product(Factor(g8.rows_RC, g8.inverse_1), Factor(columns_IO, inverse_1), dtype=dy_NO.dtype)
        pending = parallel.start_reduce(dx_NI) if column else None
        if again:
            whole_NI = kept if gathered is None else gathered.wait()
            x8 = scaling.input(whole_NI, record=False, columns=True)
            kept, kept_inverse_1 = x8.columns_CR, x8.inverse_1
        left, right = Factor(g8.columns_CR, g8.inverse_1), Factor(kept, kept_inverse_1)
        dweight = _weight_gradient(main, product, left=left, right=right, dtype=ctx.dtype)
        return dx_NI if pending is None else pending.wait(), dweight, dbias, None


def _weight_gradient(
    main: MainGradients, product: Any, *, left: Factor, right: Factor, dtype: torch.dtype
) -> Tensor | None:
    """dy^T x: [O, I], added to the main gradient, or returned if there is none."""
    if "weight" not in main.tensors:
        found: Tensor = product(left, right, dtype=dtype)
        return found
    target = main.tensors["weight"]
    product(left, right, dtype=target.dtype, out=target, add=not main.take_stale("weight"))
    return None
