"""Computing again in backward what was not kept: single tensors, or whole functions (Chen et al. 2016).

What is computed again has the bits that it had: the same functions see the same inputs, and masks of dropout are
functions of counters (dropout.py). No state of a random generator has to be put back.
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
    """run(*inputs), of which nothing but the inputs is kept for backward."""
    if not torch.is_grad_enabled():
        return run(*inputs)
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)


@contextmanager
def recomputed(x: Tensor, make: Callable[[], Tensor]) -> Iterator[None]:
    """Whoever keeps x for backward in this block keeps `make` in its place, which computes it again."""
    known = (x.data_ptr(), x.shape, x.dtype)  # not x: autograd holds both functions below as long as what they packed

    def pack(kept: Tensor) -> Any:
        return make if (kept.data_ptr(), kept.shape, kept.dtype) == known else kept

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        with torch.no_grad():
            return kept()

    with saved_tensors_hooks(pack, unpack):
        yield
