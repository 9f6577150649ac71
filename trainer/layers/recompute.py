"""Recomputation in backward of values that were not saved: single tensors, or whole functions (Chen et al. 2016).

Recomputed values have the same bits: the same functions see the same inputs, and dropout masks are functions of
counters (dropout.py). No state of a random generator has to be restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint


def keep_input(run: Callable[..., Any], *inputs: Tensor | None) -> Any:
    """run(*inputs), of which only the inputs are saved for backward."""
    if not torch.is_grad_enabled():
        return run(*inputs)
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)


@contextmanager
def recomputed_parts(parts: tuple[Tensor, ...], make: Callable[[], tuple[Tensor, ...]]) -> Iterator[None]:
    """Code in this block that saves one of these tensors, or a view of one, saves `make` instead, which gives all.

    They are contiguous. All are recomputed once, and forgotten when the last one has been used.
    """
    numbers = {part.data_ptr(): number for number, part in enumerate(parts)}
    sizes = [(part.numel(), part.dtype) for part in parts]
    packed, left, made = 0, 0, tuple[Tensor, ...]()

    def pack(kept: Tensor) -> Any:
        nonlocal packed
        number = numbers.get(kept.data_ptr())
        if number is None or (kept.numel(), kept.dtype) != sizes[number]:
            return kept
        packed += 1
        return number, kept.shape, kept.stride()

    def unpack(kept: Any) -> Tensor:
        nonlocal left, made
        if isinstance(kept, Tensor):
            return kept
        if not left:
            with torch.no_grad():
                made, left = make(), packed
        number, shape, stride = kept
        part, left = made[number].as_strided(shape, stride), left - 1
        made = made if left else ()
        return part

    with saved_tensors_hooks(pack, unpack):
        yield


@contextmanager
def recomputed(x: Tensor, make: Callable[[], Tensor]) -> Iterator[None]:
    """Code in this block that saves x for backward saves `make` instead, which recomputes it."""
    signature = (
        x.data_ptr(),
        x.shape,
        x.dtype,
    )  # not x: autograd holds both functions below as long as what they packed

    def pack(kept: Tensor) -> Any:
        return make if (kept.data_ptr(), kept.shape, kept.dtype) == signature else kept

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return kept()

    with saved_tensors_hooks(pack, unpack):
        yield
