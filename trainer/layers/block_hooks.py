"""Hooks at the borders of a model's blocks, forward and backward.

The model only says at which border it is: code that divides parameters or gradients over ranks puts its hooks there.
Blocks are numbered as in ParamSpec: 0 before the first block, n the n-th, and so on. The borders between blocks are
nodes of autograd's graph; the code that runs a stage calls the hooks at its ends.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor


class BlockHooks:
    """Hooks that do nothing.

    Attributes:
        last_microbatch: whether the current backward pass (or half of it) is the last one of its stage in the step.
        later: collects work that waits for the products of weights' gradients, for a backward pass that is split in
            two; None: nothing is postponed.
    """

    def __init__(self) -> None:
        self.last_microbatch = False
        self.later: list[Callable[[], None]] | None = None

    def before_forward(self, block: int, *, adds: bool = False) -> None:
        """The block's parameters are used next; `adds`: this forward pass adds to its main gradients."""

    def before_gradients(self, block: int) -> None:
        """The block's main gradients are added to next."""

    def after_gradients(self, block: int) -> None:
        """A microbatch has added all that it adds to the block's main gradients."""

    def before_backward(self, block: int) -> None:
        """The block's backward pass is next."""
        self.before_gradients(block)
        if self.later is not None:
            self.later.append(partial(self.before_gradients, block))

    def after_backward(self, block: int) -> None:
        """The block's input has its gradient."""
        if self.later is None:
            self.after_gradients(block)
        else:
            self.later.append(partial(self.after_gradients, block))


def enter_block(
    hooks: BlockHooks, block: int, *, stream: tuple[Tensor | None, ...], adds: bool = False
) -> tuple[Any, ...]:
    """Call the hooks between one block of a stage and the next, in both directions.

    Args:
        stream: output of the previous block, and what else crosses the border; the first is no None.
    """
    hooks.before_forward(block, adds=adds)
    if stream[0] is None or not stream[0].requires_grad:
        return stream
    given: tuple[Any, ...] = _Border.apply(hooks, block, *stream)
    return given


def leave_block(hooks: BlockHooks, block: int, *, x: Tensor) -> Tensor:
    """The output of a stage whose backward pass is run by other code: its hooks begin here."""
    if not x.requires_grad:
        return x
    (given,) = _Border.apply(hooks, block + 1, x)
    return cast(Tensor, given)


class _Border(torch.autograd.Function):
    """Forward: identity. Backward: identity, between two blocks."""

    @staticmethod
    def forward(ctx: Any, hooks: BlockHooks, block: int, *stream: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.hooks, ctx.block = hooks, block
        ctx.set_materialize_grads(False)  # the last norm reads one of the two only
        return tuple(None if x is None else x.view_as(x) for x in stream)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.hooks.after_backward(ctx.block)
        ctx.hooks.before_backward(ctx.block - 1)
        return None, None, *gradients
