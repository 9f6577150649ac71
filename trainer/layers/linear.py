"""Linear layers with their own backward pass.

Column-parallel: the outputs are divided over tp. Row-parallel: the inputs are, and the ranks' results are summed
(Shoeybi et al. 2019, "Megatron-LM"). One autograd function serves both, because each is the other's backward. It saves
only this rank's part of the input and gathers it again; in backward the communication of the input's gradient overlaps
with the weight's product, which is added directly into the main gradient.

In FP8 only the products are rounded: communication, biases and results stay in the dtype of the activations, and the
weight's gradient is added directly into the fp32 main gradient. Saved for backward is the transpose of the rounded
input, half the bytes of the input itself; under sequence parallelism it is this rank's part of the unrounded input,
which is gathered and rounded again.

Shapes: N tokens, I inputs and O outputs of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.kernels.few_rows import FEW, one_row_product, works_without_rounding
from trainer.kernels.float8 import (
    Float8Rows,
    Operand,
    float8_rows,
    float8_rows_grouped_product,
    float8_rows_matrix,
    float8_rows_product,
)
from trainer.layers.base import Layer, MainGradients, Parallel, add_bias_gradient, add_weight_gradient
from trainer.layers.float8_scaling import LayerScaling
from trainer.layers.lora import Adapters, adapted_linear
from trainer.parallel.collectives import all_reduce_


class Linear(Layer):
    """This rank's part of y = x W^T + b.

    Args:
        inputs, outputs: local widths.
        parallel: the tensor-parallel axis. bias: whether there is one.
        column: whether the outputs are divided over tp (otherwise the inputs).

    Attributes:
        float8: how its products are computed in FP8; None: in the dtype of the weight.
        adapters: beside the weight, with the parameters lora_a and lora_b, see lora.py; None: there are none.
        kept_rows: the weight in FP8, used instead of `weight`, see `keep_rows`; or None.
        one_row: x W^T of one token, if the layer only runs forward, see `use_one_row_kernel`; None: as of many tokens.
    """

    def __init__(self, inputs: int, outputs: int, *, parallel: Parallel, bias: bool, column: bool) -> None:
        super().__init__()
        self.parallel, self.column = parallel, column
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.adapters: Adapters | None = None
        self.lora_a: nn.Parameter | None = None
        self.lora_b: nn.Parameter | None = None
        self.float8: LayerScaling | None = None
        self.kept_rows: Float8Rows | None = None
        self.one_row: Callable[[Tensor, Tensor], Tensor] | None = None
        self._rows_kernels = Float8RowsKernels(float8_rows, float8_rows_product)

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """The weight, also where it is kept in FP8 alone."""
        return self.weight if self.kept_rows is None else float8_rows_matrix(self.kept_rows, dtype=dtype)

    @property
    def prepares(self) -> bool:
        """In FP8."""
        return self.float8 is not None

    def prepare(self) -> None:
        """Round the weight to FP8 if it has changed since it was last rounded."""
        if self.float8 is not None:
            self.float8.keep_weight(self.weight)

    @torch.no_grad()
    def keep_rows(self, kernels: Float8RowsKernels) -> None:
        """From now on keep the weight in FP8 alone, with a scale for each output; the layer only runs forward.

        Its scales do not depend on the number of ranks.
        """
        largest_O1 = self.weight.float().abs().amax(-1, keepdim=True)
        if not self.column:
            largest_O1 = all_reduce_(largest_O1, self.parallel.tp, op="max")
        self.kept_rows, self._rows_kernels = float8_rows(self.weight, largest_O1), kernels
        self.register_parameter("weight", None)

    def forward(self, x_NI: Tensor) -> Tensor:
        if self.kept_rows is not None:
            return self._forward_with_rows(x_NI, self.kept_rows)
        if self.adapters is not None:
            assert self.lora_a is not None and self.lora_b is not None, "add_adapters sets all three"
            return adapted_linear(
                x_NI,
                self.weight,
                bias_O=self.bias,
                a_RI=self.lora_a,
                b_PR=self.lora_b,
                adapters=self.adapters,
                main=self.main_gradients,
                parallel=self.parallel,
                column=self.column,
                float8=self.float8,
            )
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
        if self.one_row is not None and len(x_NI) == 1:
            return self._summed(self.one_row(self.parallel.gather(x_NI) if self.column else x_NI, self.weight))
        apply = _Column.apply if self.column else _Row.apply
        return apply(x_NI, self.weight, self.bias, self.parallel, self.main_gradients)

    def _forward_with_rows(self, x_NI: Tensor, rows_OI: Float8Rows) -> Tensor:
        """Inputs are rounded with a scale for each token, of the columns that this rank has."""
        whole_NI, kernels = self.parallel.gather(x_NI) if self.column else x_NI, self._rows_kernels
        if kernels.few is not None and len(whole_NI) <= FEW:
            y_NO = kernels.few(whole_NI, rows_OI, dtype=x_NI.dtype)
        else:
            y_NO = kernels.product(kernels.quantize(whole_NI), rows_OI, dtype=x_NI.dtype)
        return self._summed(y_NO)

    def _summed(self, y_NO: Tensor) -> Tensor:
        """A product of this rank's columns, summed over tp where the inputs are divided, and with the bias."""
        if not self.column:
            y_NO = self.parallel.reduce(y_NO)
        return y_NO if self.bias is None else y_NO.add_(self.bias)


def use_one_row_kernel(model: nn.Module, *, device: torch.device) -> None:
    """Let the layers of a model that only runs forward multiply one token by the kernel of few_rows.py.

    Nothing changes except on a GPU in bf16 where a trial of the kernel passes.
    """
    linears = [layer for layer in model.modules() if isinstance(layer, Linear)]
    in_bf16 = bool(linears) and linears[0].weight.dtype == torch.bfloat16
    if device.type == "cuda" and in_bf16 and works_without_rounding(device):
        for layer in linears:
            layer.one_row = one_row_product


class Float8RowsKernels(NamedTuple):
    """The operations of kernels/float8.py on matrices with a scale for each row, or those of a GPU.

    Args:
        few: both in one kernel, for up to FEW rows; None: there is none.
        grouped: both, for rows of experts.
    """

    quantize: Callable[[Tensor], Float8Rows]
    product: Callable[..., Tensor]
    few: Callable[..., Tensor] | None = None
    grouped: Callable[[Tensor, Float8Rows, Tensor], Tensor] = float8_rows_grouped_product


def column_product(x_ND: Tensor, layer: Layer, *, weight: Tensor, parallel: Parallel) -> Tensor:
    """x W^T with a weight of another layer, such as the embedding's: [N, D] -> [N all tokens, rows of the weight]."""
    return _Column.apply(x_ND, weight, None, parallel, layer.main_gradients)


class _Column(torch.autograd.Function):
    """Forward: gather, multiply. Backward: multiply and reduce, overlapped with the weight's product."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, parallel: Parallel, main: MainGradients
    ) -> Tensor:
        ctx.save_for_backward(None if "weight" in main.frozen else x_NI, weight_OI)
        ctx.parallel, ctx.main, ctx.bias = parallel, main, bias_O is not None
        return F.linear(parallel.gather(x_NI), weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        gathered = None if x_NI is None else ctx.parallel.start_gather(x_NI)
        dx = ctx.parallel.start_reduce(dy_NO @ weight_OI)
        dweight = None
        if gathered is not None:
            dweight = add_weight_gradient(ctx.main, "weight", dy_NO=dy_NO, x_NI=gathered.wait())
        dbias = add_bias_gradient(ctx.main, dy_NO) if ctx.bias else None
        return dx.wait(), dweight, dbias, None, None


class _Row(torch.autograd.Function):
    """Forward: multiply, reduce; the bias is added once, to the sum. Backward: gather, multiply."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, parallel: Parallel, main: MainGradients
    ) -> Tensor:
        ctx.save_for_backward(None if "weight" in main.frozen else x_NI, weight_OI)
        ctx.parallel, ctx.main, ctx.bias = parallel, main, bias_O is not None
        if parallel.tp.size == 1:
            return F.linear(x_NI, weight_OI, bias_O)
        y_NO = parallel.reduce(F.linear(x_NI, weight_OI))
        return y_NO if bias_O is None else y_NO.add_(bias_O)

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        gathered = ctx.parallel.start_gather(dy_NO)
        dbias = add_bias_gradient(ctx.main, dy_NO) if ctx.bias else None
        whole_NO = gathered.wait()
        dx_NI = whole_NO @ weight_OI
        return dx_NI, add_weight_gradient(ctx.main, "weight", dy_NO=whole_NO, x_NI=x_NI), dbias, None, None


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
    """x W^T + b of one rank; see `Linear` for column and row."""
    options = _Float8Options(main, parallel, column, scaling, record=torch.is_grad_enabled())
    return _Float8Linear.apply(x_NI, weight_OI, bias_O, options)


class _Float8Options(NamedTuple):
    """`record`: whether the largest values of this pass count."""

    main: MainGradients
    parallel: Parallel
    column: bool
    scaling: LayerScaling
    record: bool


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, options: _Float8Options) -> Tensor:
        main, parallel, column, scaling, record = options
        product = scaling.model.kernels.product
        # Rounded again if that needs no memory: another layer keeps the input, or only a part of it is held.
        again = scaling.model.recipe.input_again or (column and parallel.sequence_parallel)
        frozen = "weight" in main.frozen
        whole_NI = parallel.gather(x_NI) if column else x_NI
        x8, w8 = scaling.input(whole_NI, record=record, columns=not (again or frozen)), scaling.weight(weight_OI)
        alone = column or parallel.tp.size == 1
        y_NO = product(x8.rows, w8.rows, dtype=x_NI.dtype, bias_N=bias_O if alone else None, fast=True)
        assert w8.columns is not None, "a weight is rounded with its transpose"
        kept = (None, None) if frozen else (x_NI, None) if x8.columns is None else x8.columns[:2]
        ctx.save_for_backward(*kept, *w8.columns[:2])
        ctx.blocks = x8.rows.blocks, w8.rows.blocks
        ctx.options, ctx.bias, ctx.dtype = options, bias_O is not None, weight_OI.dtype
        if alone:
            return y_NO
        y_NO = parallel.reduce(y_NO)
        return y_NO if bias_O is None else y_NO.add_(bias_O)

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        kept, kept_inverse, columns_IO, inverse = ctx.saved_tensors
        (x_blocks, weight_blocks), (main, parallel, column, scaling, _) = ctx.blocks, ctx.options
        product, frozen = scaling.model.kernels.product, "weight" in main.frozen
        again = kept_inverse is None and not frozen
        gathered = parallel.start_gather(kept) if again and column else None
        dbias = add_bias_gradient(main, dy_NO) if ctx.bias else None
        g8 = scaling.gradient(dy_NO if column else parallel.gather(dy_NO), columns=not frozen)
        dx_NI = product(g8.rows, Operand(columns_IO, inverse, weight_blocks), dtype=dy_NO.dtype)
        pending = parallel.start_reduce(dx_NI) if column else None
        dweight = None
        if not frozen:
            right = Operand(kept, kept_inverse, x_blocks)
            if again:
                whole_NI = kept if gathered is None else gathered.wait()
                right = scaling.input(whole_NI, record=False, columns=True).columns
            dweight = _weight_gradient(main, product, left=g8.columns, right=right, dtype=ctx.dtype)
        return dx_NI if pending is None else pending.wait(), dweight, dbias, None


def _weight_gradient(
    main: MainGradients, product: Any, *, left: Operand, right: Operand, dtype: torch.dtype
) -> Tensor | None:
    """dy^T x: [O, I], added to the main gradient, or returned if there is none."""
    if "weight" not in main.tensors:
        gradient: Tensor = product(left, right, dtype=dtype)
        return gradient
    target = main.tensors["weight"]
    product(left, right, dtype=target.dtype, out=target, add=not main.take_stale("weight"))
    return None
