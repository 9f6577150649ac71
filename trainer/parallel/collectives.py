"""Every collective of the trainer, each over an explicit mesh axis.

Whoever audits communication reads this page: no other file calls torch.distributed for data. The first half are
plain functions on tensors and objects; the second half are autograd functions in conjugate pairs (Shoeybi et al.
2019, "Megatron-LM", f and g; Korthikanti et al. 2022, "Reducing Activation Recomputation", their sequence-parallel
forms). Over an axis of size 1 each returns its input, so that one rank and many run the same code. Functions
return new tensors; those that write into their argument end in `_`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh as one rank sees it.

    Args:
        name: "tp", "dp" or "world".
        size: ranks along the axis.
        rank: this rank's place on it.
        group: the process group; None when size is 1.
    """

    name: str
    size: int
    rank: int
    group: dist.ProcessGroup | None = None

    @staticmethod
    def single(name: str) -> Axis:
        """An axis of size 1: every collective over it is the identity."""
        return Axis(name, 1, 0)


def all_reduce_(x: Tensor, axis: Axis, *, op: str = "sum") -> Tensor:
    """Sum (or "max") over the axis, written into x and returned."""
    if axis.size > 1:
        dist.all_reduce(x, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op], group=axis.group)
    return x


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Concatenate every rank's x along dim 0: [n, ...] -> [n * size, ...]."""
    if axis.size == 1:
        return x
    if not x.is_cuda:
        return _exchange(x.expand(axis.size, *x.shape).flatten(0, 1), axis)
    out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    _renamed("all_gather_single", "all_gather_into_tensor")(out, x.contiguous(), group=axis.group)
    return out


def all_gather_(buffer: Tensor, axis: Axis) -> Tensor:
    """Every rank's own part of dim 0, [n] of [n * size], written into every rank's buffer, which is returned."""
    own = buffer.unflatten(0, (axis.size, -1))[axis.rank]
    if axis.size == 1:
        return buffer
    if not buffer.is_cuda:
        return buffer.copy_(all_gather(own, axis))
    _renamed("all_gather_single", "all_gather_into_tensor")(buffer, own, group=axis.group)
    return buffer


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """Sum over the axis, then keep this rank's part of dim 0: [n * size, ...] -> [n, ...]."""
    if axis.size == 1:
        return x
    assert x.shape[0] % axis.size == 0, f"dim 0 is {x.shape[0]}, not a multiple of {axis.name}={axis.size}"
    if not x.is_cuda:
        return _exchange(x, axis).unflatten(0, (axis.size, -1)).sum(0)
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    _renamed("reduce_scatter_single", "reduce_scatter_tensor")(out, x.contiguous(), group=axis.group)
    return out


@dataclass(frozen=True, slots=True)
class Pending:
    """A result that may still be on its way; communication goes on beside what is computed until `wait`."""

    result: Tensor
    work: Any = None

    def wait(self) -> Tensor:
        """The result; what is computed from here on comes after it."""
        if self.work is not None:
            self.work.wait()
        return self.result


def start_all_reduce_(x: Tensor, axis: Axis) -> Pending:
    """Begin the sum over the axis, written into x."""
    if axis.size == 1 or not x.is_cuda:
        return Pending(all_reduce_(x, axis))
    return Pending(x, dist.all_reduce(x, group=axis.group, async_op=True))


def start_all_gather(x: Tensor, axis: Axis) -> Pending:
    """Begin `all_gather`."""
    if axis.size == 1 or not x.is_cuda:
        return Pending(all_gather(x, axis))
    out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    gather = _renamed("all_gather_single", "all_gather_into_tensor")
    return Pending(out, gather(out, x.contiguous(), group=axis.group, async_op=True))


def start_reduce_scatter(x: Tensor, axis: Axis) -> Pending:
    """Begin `reduce_scatter`."""
    if axis.size == 1 or not x.is_cuda:
        return Pending(reduce_scatter(x, axis))
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
    return Pending(out, scatter(out, x.contiguous(), group=axis.group, async_op=True))


def gather_objects(value: T, axis: Axis) -> list[T]:
    """Every rank's value, in rank order, on every rank. For small plain data."""
    if axis.size == 1:
        return [value]
    out: list[Any] = [None] * axis.size
    dist.all_gather_object(out, value, group=axis.group)
    return out


def copy_to_axis(x: Tensor, axis: Axis) -> Tensor:
    """Forward: identity. Backward: all-reduce. (f; the conjugate of reduce_from_axis.)"""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from_axis(x: Tensor, axis: Axis) -> Tensor:
    """Forward: all-reduce. Backward: identity. (g; the conjugate of copy_to_axis.)"""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def gather_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Forward: all-gather along dim 0. Backward: reduce-scatter. (Conjugate of scatter_sequence.)"""
    return x if axis.size == 1 else _GatherSequence.apply(x, axis)


def scatter_sequence(x: Tensor, axis: Axis) -> Tensor:
    """Forward: reduce-scatter along dim 0. Backward: all-gather. (Conjugate of gather_sequence.)"""
    return x if axis.size == 1 else _ScatterSequence.apply(x, axis)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_(grad.clone(memory_format=torch.contiguous_format), ctx.axis), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce_(x.clone(memory_format=torch.contiguous_format), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return all_gather(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.axis), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return reduce_scatter(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.axis), None


def _exchange(x: Tensor, axis: Axis) -> Tensor:
    """Part i of dim 0 goes to rank i; what came, in rank order.

    On CPUs the two functions above are made of it: gloo's own take up to three times as long for the messages of a
    small model, with a tail of 4 ms (benchmarks/collectives.py), and its sum has no fixed order.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=axis.group)
    return out


def _renamed(new: str, old: str) -> Callable[..., Any]:
    """PyTorch 2.13 renamed these two; 2.11 has only the old names."""
    return getattr(dist, new, None) or getattr(dist, old)
