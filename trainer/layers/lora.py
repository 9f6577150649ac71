"""Adapters of low rank beside the frozen weight of a linear layer (Hu et al. 2022, "LoRA").

y = x W^T + b + scale (x A^T) B^T. A and B belong to logical matrices: a layer that computes q, k and v in one product
has one A and one B for each of them that is adapted, one below the other. Both products are in the parallel region of
the layer and share its communication. Column-parallel: A is whole on each rank, B has the rows of W. Row-parallel: A
has the columns of W, B is whole, and what is added to y is summed with it. The gradient of the whole one is then a
partial sum on each rank; the table of parameters says so (`with_adapters` in parallel/params.py). In FP8 only the
products with W are rounded. There is no dropout.

Shapes: N tokens, I inputs and O outputs of this rank, R the ranks of all adapters of a layer, P rows of their B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.kernels.float8 import Operand
from trainer.layers.base import MainGradients, Parallel, add_bias_gradient, add_weight_gradient
from trainer.layers.float8_scaling import LayerScaling
from trainer.parallel.params import ParamSpec


class AdapterPart(NamedTuple):
    """The adapter of one logical matrix: its outputs in y, its rows of B, and its rows of A."""

    outputs: slice
    rows: slice
    ranks: slice


class Adapters(NamedTuple):
    """Those of a layer; `scale` is the factor of what they add."""

    parts: tuple[AdapterPart, ...]
    scale: float


def add_adapters(model: nn.Module, table: Sequence[ParamSpec], *, scale: float) -> None:
    """Give the linear layers of a stage the adapters of its table."""
    specs = {spec.name: spec for spec in table}
    for name in [name.removesuffix(".lora_b") for name in specs if name.endswith(".lora_b")]:
        weight, a, b = (specs[f"{name}.{kind}"] for kind in ("weight", "lora_a", "lora_b"))
        first = {piece.name.removesuffix(".weight"): piece.offset // weight.shape[1] for piece in weight.pieces}
        rank = b.shape[1]
        parts = []
        for number, piece in enumerate(b.pieces):
            output, row, count = first[piece.name.removesuffix(".lora_b")], piece.offset // rank, piece.size[0]
            ranks = slice(number * rank, (number + 1) * rank)
            parts.append(AdapterPart(slice(output, output + count), slice(row, row + count), ranks))
        layer: Any = model.get_submodule(name)
        layer.adapters = Adapters(tuple(parts), scale)
        layer.lora_a, layer.lora_b = (nn.Parameter(layer.weight.new_empty(spec.shape)) for spec in (a, b))


def adapted_linear(
    x_NI: Tensor,
    weight_OI: Tensor,
    *,
    bias_O: Tensor | None,
    a_RI: Tensor,
    b_PR: Tensor,
    adapters: Adapters,
    main: MainGradients,
    parallel: Parallel,
    column: bool,
    float8: LayerScaling | None = None,
) -> Tensor:
    """The output of one rank; see `Linear` for column, row and `float8`. The weight is frozen."""
    options = _Options(adapters, main, parallel, column, float8, record=torch.is_grad_enabled())
    return _Adapted.apply(x_NI, weight_OI, bias_O, a_RI, b_PR, options)


class _Options(NamedTuple):
    """`record`: whether the largest values of this pass count."""

    adapters: Adapters
    main: MainGradients
    parallel: Parallel
    column: bool
    float8: LayerScaling | None
    record: bool


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_PR: Tensor,
        options: _Options,
    ) -> Tensor:
        (parts, scale), _, parallel, column, float8, record = options
        whole_NI = parallel.gather(x_NI) if column else x_NI
        alone = column or parallel.tp.size == 1
        u_NR = F.linear(whole_NI, a_RI).mul_(scale)
        first_O = bias_O if alone else None
        kept: tuple[Tensor | None, Tensor | None]
        if float8 is None:
            # The large product comes last: it adds to the small one as it writes, and rounds the sum once.
            y_NO, kept = whole_NI.new_empty(len(whole_NI), len(weight_OI)), (weight_OI, None)
            begun = first_O is not None or len(b_PR) < len(weight_OI)
            if begun:
                y_NO.copy_(y_NO.new_zeros(()) if first_O is None else first_O)
        else:
            x8, w8 = float8.input(whole_NI, record=record, columns=False), float8.weight(weight_OI)
            y_NO = float8.model.kernels.product(x8.rows, w8.rows, dtype=x_NI.dtype, bias_N=first_O, fast=True)
            assert w8.columns is not None, "a weight is rounded with its transpose"
            kept, begun, ctx.blocks = w8.columns[:2], True, w8.columns.blocks
        for outputs, rows, ranks in parts:
            y_NP = y_NO[:, outputs]
            torch.addmm(y_NP, u_NR[:, ranks], b_PR[rows].t(), beta=int(begun), out=y_NP)
        if float8 is None:
            y_NO.addmm_(whole_NI, weight_OI.t())
        ctx.save_for_backward(x_NI, *kept, a_RI, b_PR, u_NR)
        ctx.options, ctx.bias = options, bias_O is not None
        if alone:
            return y_NO
        y_NO = parallel.reduce(y_NO)
        return y_NO if bias_O is None else y_NO.add_(bias_O)

    @staticmethod
    def backward(ctx: Any, dy_NO: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight, inverse, a_RI, b_PR, u_NR = ctx.saved_tensors
        (parts, scale), main, parallel, column, float8, _ = ctx.options
        gathered = parallel.start_gather(x_NI) if column else None
        dbias = add_bias_gradient(main, dy_NO) if ctx.bias else None
        if not column:
            dy_NO = parallel.gather(dy_NO)
        du_NR = torch.empty_like(u_NR)
        for outputs, rows, ranks in parts:
            torch.mm(dy_NO[:, outputs], b_PR[rows], out=du_NR[:, ranks])
        du_NR.mul_(scale)
        if float8 is None:
            dx_NI = (du_NR @ a_RI).addmm_(dy_NO, weight)
        else:
            g8 = float8.gradient(dy_NO, columns=False)
            columns = Operand(weight, inverse, ctx.blocks)
            dx_NI = float8.model.kernels.product(g8.rows, columns, dtype=dy_NO.dtype).addmm_(du_NR, a_RI)
        pending = parallel.start_reduce(dx_NI) if column else None
        if gathered is not None:
            x_NI = gathered.wait()
        da = add_weight_gradient(main, "lora_a", dy_NO=du_NR, x_NI=x_NI)
        db = _add_b_gradient(main, parts, dy_NO=dy_NO, u_NR=u_NR)
        return dx_NI if pending is None else pending.wait(), None, dbias, da, db, None


def _add_b_gradient(main: MainGradients, parts: Sequence[AdapterPart], *, dy_NO: Tensor, u_NR: Tensor) -> Tensor | None:
    """The gradient of B, [P, R of one part], added to its main gradient, or returned if there is none."""
    if "lora_b" not in main.tensors:
        return torch.cat([dy_NO[:, part.outputs].t() @ u_NR[:, part.ranks] for part in parts])

    def add() -> None:
        target_PR, stale = main.tensors["lora_b"], main.take_stale("lora_b")
        for outputs, rows, ranks in parts:
            main.add_product(target_PR[rows], dy_NO[:, outputs], x_NI=u_NR[:, ranks], overwrite=stale)

    if main.later is None:
        add()
    else:
        main.later.append(add)
    return None
