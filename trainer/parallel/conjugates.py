"""Collectives that autograd differentiates: the backward pass of each is its conjugate collective.

After Shoeybi et al. 2019, "Megatron-LM", and Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
Transformer Models". Linear layers have their own backward pass and use none of these. Over a group of one each returns
its input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.parallel.collectives import Group, all_gather, all_reduce_, reduce_scatter


def reduce_from_group(x: Tensor, group: Group) -> Tensor:
    """Forward: all-reduce. Backward: identity. (g of Shoeybi et al.)"""
    return x if group.size == 1 else _Reduce.apply(x, group)


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Forward: identity. Backward: all-reduce. (f of Shoeybi et al.)"""
    return x if group.size == 1 else _Copy.apply(x, group)


def gather_sequence(x: Tensor, group: Group) -> Tensor:
    """Forward: all-gather along dim 0. Backward: reduce-scatter. (Conjugate of scatter_sequence.)"""
    return x if group.size == 1 else _GatherSequence.apply(x, group)


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """Forward: all-gather along dim 0. Backward: this rank's rows; all ranks compute the same."""
    return x if group.size == 1 else _GatherRows.apply(x, group)


def scatter_sequence(x: Tensor, group: Group) -> Tensor:
    """Forward: reduce-scatter along dim 0. Backward: all-gather. (Conjugate of gather_sequence.)"""
    return x if group.size == 1 else _ScatterSequence.apply(x, group)


def gather_columns(x: Tensor, group: Group) -> Tensor:
    """Forward: all-gather along dim 1 of a matrix. Backward: this rank's columns; all ranks compute the same."""
    return x if group.size == 1 else _GatherColumns.apply(x, group)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return all_reduce_(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.group), None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mine = slice(group.rank * len(x), (group.rank + 1) * len(x))
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.mine].contiguous(), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group), None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        width = x.shape[1]
        ctx.mine = slice(group.rank * width, (group.rank + 1) * width)
        return all_gather(x.t().contiguous(), group).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[:, ctx.mine].contiguous(), None
