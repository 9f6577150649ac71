"""Shared parts of the layers: main gradients, and how activations enter and leave a tensor-parallel region.

A `Layer` may have a main gradient beside each parameter, in at least fp32 unless precision.gradients says otherwise.
Its backward then adds into it and returns no gradient to autograd, so that nothing is rounded on the way and no hook
runs. Without one (a model that is only evaluated, or used with another optimizer) autograd gets ordinary gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainer.kernels.plain import add_product
from trainer.parallel.collectives import (
    Group,
    Pending,
    all_gather,
    all_reduce_,
    reduce_scatter,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
)


class MainGradients:
    """A layer's main gradients, by the names of its parameters: tensors of their shapes.

    After an update they are stale: their content counts as zero. The first product of a step overwrites them, which
    saves a pass that clears and one that reads; code that can only add gets zeros.

    Attributes:
        frozen: the names of parameters of which no gradient is computed.
        add_product: the implementation of kernels.plain.add_product for weights.
        later: collects postponed products of weights' gradients, for a backward pass that is split in two; None: they
            are computed at once.
        decisions: collects (name, whether it was stale) for each gradient that backward writes; None: not recorded.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.frozen: frozenset[str] = frozenset()
        self.add_product: Callable[..., None] = add_product
        self.later: list[Callable[[], None]] | None = None
        self.decisions: list[tuple[str, bool]] | None = None
        self._stale: set[str] = set()

    def forget(self) -> None:
        """Mark all of them as stale."""
        self._stale = set(self.tensors)

    def get(self, name: str) -> Tensor | None:
        """A main gradient to add to; None if there is none."""
        if self.take_stale(name):
            self.tensors[name].zero_()
        return self.tensors.get(name)

    def take_stale(self, name: str) -> bool:
        """Whether the caller must overwrite the tensor instead of adding to it; true once after each `forget`."""
        stale = name in self._stale
        self._stale.discard(name)
        if self.decisions is not None:
            self.decisions.append((name, stale))
        return stale

    def repeat(self, *, overwritten: frozenset[str], added: frozenset[str]) -> None:
        """A recorded pass is replayed: it overwrites the first ones and adds to the others."""
        assert overwritten <= self._stale and self._stale.isdisjoint(added), (
            f"recorded: {sorted(overwritten)} overwritten, {sorted(added)} added to; stale are {sorted(self._stale)}"
        )
        self._stale -= overwritten

    def settle(self) -> None:
        """Clear tensors that are still stale."""
        for name in tuple(self._stale):
            self.get(name)


class Layer(nn.Module):
    """A module whose backward adds to main gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.main_gradients = MainGradients()

    @property
    def prepares(self) -> bool:
        """Whether passes of a step share more than the parameters; `prepare` computes it."""
        return False

    def prepare(self) -> None:
        """Compute what the passes of a step share, before a recorded pass uses it."""


@contextmanager
def weights_later(layers: Sequence[Layer]) -> Iterator[list[Callable[[], None]]]:
    """Collect the weight products that backward postpones in this block, in the order in which to call them."""
    later: list[Callable[[], None]] = []
    for layer in layers:
        layer.main_gradients.later = later
    try:
        yield later
    finally:
        for layer in layers:
            layer.main_gradients.later = None


class Parallel:
    """A tensor-parallel axis, with or without sequence parallelism.

    Between the parallel linears a rank holds all N tokens, or N / tp of them under sequence parallelism, which divides
    dim 0 (Korthikanti et al. 2022, "Reducing Activation Recomputation").
    """

    def __init__(self, tp: Group, *, sequence_parallel: bool) -> None:
        self.tp, self.sequence_parallel = tp, sequence_parallel

    def gather(self, x_ND: Tensor) -> Tensor:
        """All tokens, from what this rank holds."""
        return all_gather(x_ND, self.tp) if self.sequence_parallel else x_ND

    def reduce(self, partial_ND: Tensor) -> Tensor:
        """The sum of all ranks' partial results, for this rank's tokens; may write into its argument."""
        return reduce_scatter(partial_ND, self.tp) if self.sequence_parallel else all_reduce_(partial_ND, self.tp)

    def start_gather(self, x_ND: Tensor) -> Pending:
        """`gather`, overlapped with the following computation."""
        return start_all_gather(x_ND, self.tp) if self.sequence_parallel else Pending(x_ND)

    def start_reduce(self, partial_ND: Tensor) -> Pending:
        """`reduce`, overlapped with the following computation."""
        start = start_reduce_scatter if self.sequence_parallel else start_all_reduce_
        return start(partial_ND, self.tp)

    def local_tokens(self, num_tokens: int) -> slice:
        """The tokens that this rank holds outside the parallel regions."""
        if not self.sequence_parallel:
            return slice(0, num_tokens)
        part = num_tokens // self.tp.size
        return slice(self.tp.rank * part, (self.tp.rank + 1) * part)


def add_weight_gradient(main: MainGradients, name: str, *, dy_NO: Tensor, x_NI: Tensor) -> Tensor | None:
    """A weight's gradient dy^T x: [O, I], added to its main gradient, or returned if there is none."""
    if name in main.frozen:
        return None
    if name not in main.tensors:
        return dy_NO.t() @ x_NI

    def add() -> None:
        main.add_product(main.tensors[name], dy_NO, x_NI=x_NI, overwrite=main.take_stale(name))

    if main.later is None:
        add()
    else:
        main.later.append(add)
    return None


def add_bias_gradient(main: MainGradients, dy_NO: Tensor) -> Tensor | None:
    """The sum of dy over tokens, added to the bias's main gradient, or returned if there is none.

    A bias is a weight whose input is 1; as a product it takes one pass, while a sum in fp32 takes two.
    """
    if "bias" in main.frozen:
        return None
    ones_N1 = dy_NO.new_ones(len(dy_NO), 1)
    if "bias" not in main.tensors:
        return (dy_NO.t() @ ones_N1).squeeze(1)
    add_product(main.tensors["bias"].unsqueeze(1), dy_NO, x_NI=ones_N1, overwrite=main.take_stale("bias"))
    return None


def add_vector(main: MainGradients, name: str, gradient: Tensor, *, dtype: torch.dtype) -> Tensor | None:
    """A gradient that was summed in a wider dtype: added to the main one, or returned in the parameter's dtype."""
    if name in main.frozen:
        return None
    if (target := main.get(name)) is None:
        return gradient.to(dtype)
    target.add_(gradient)
    return None


def add_rows(main: Tensor | None, rows_N: Tensor, *, dy_ND: Tensor, like: Tensor) -> Tensor | None:
    """A table's gradient: dy[n] added to row rows[n] of `main`, or of a new tensor like the table, which is returned.

    The order is fixed on both kinds of device, so that a repeated run gives the same bits.
    """
    target = torch.zeros_like(like) if main is None else main
    if target.is_cuda and len(target) <= _FEW_ROWS:
        add_few_rows(target, rows_N, dy_ND)
    elif target.is_cuda:
        target.index_put_((rows_N,), dy_ND.to(target.dtype), accumulate=True)  # sorted; index_add_ would be atomic
    else:
        target.index_add_(0, rows_N, dy_ND.to(target.dtype))
    return target if main is None else None


_FEW_ROWS = 4  # of a table, for which a sum for each row is faster than sorting (bert-large's two types: 12 ms a step)


def add_few_rows(target: Tensor, rows_N: Tensor, dy_ND: Tensor) -> None:
    """Add dy[n] to row rows[n] of a table of few rows, by a sum for each row in the table's dtype."""
    for row, target_D in enumerate(target):
        target_D.add_(torch.where((rows_N == row).unsqueeze(1), dy_ND, 0).sum(0, dtype=target.dtype))


def as_input(layer: Layer, name: str) -> Tensor:
    """A small parameter as a tensor for plain functions; its gradient goes to its main gradient."""
    return as_inputs((layer, name))[0]


def as_inputs(*places: tuple[Layer, str]) -> tuple[Tensor, ...]:
    """`as_input` of several parameters at once, which takes the host a fraction of the time."""
    parameters = [getattr(layer, name) for layer, name in places]
    wide: tuple[Tensor, ...] = _AsInputs.apply([(layer.main_gradients, name) for layer, name in places], *parameters)
    return wide


class _AsInputs(torch.autograd.Function):
    """Forward: copies of parameters, in at least fp32. Backward: add to their main gradients."""

    @staticmethod
    def forward(ctx: Any, places: list[tuple[MainGradients, str]], *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.places, ctx.dtypes = places, [parameter.dtype for parameter in parameters]
        wide = [torch.empty_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in parameters]
        torch._foreach_copy_(wide, parameters)
        return tuple(wide)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        returned: list[Tensor | None] = [None] * len(gradients)
        added, overwritten = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for number, ((main, name), gradient) in enumerate(zip(ctx.places, gradients, strict=True)):
            if name in main.frozen:
                continue
            if name not in main.tensors:
                returned[number] = gradient.to(ctx.dtypes[number])
                continue
            (overwritten if main.take_stale(name) else added).append((main.tensors[name], gradient))
        if added:
            torch._foreach_add_([main for main, _ in added], [gradient for _, gradient in added])
        if overwritten:
            torch._foreach_copy_([main for main, _ in overwritten], [gradient for _, gradient in overwritten])
        return None, *returned
