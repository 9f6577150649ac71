"""Which implementation of each small operation a run uses.

`plain.py` and `plain_updates.py` say what each operation computes. On a GPU the pointwise ones are the same functions
compiled by torch.compile, each for itself: fused into one or two passes over memory, with the plain function as twin.
On a CPU they are PyTorch's own kernels where it has some (library.py). A model is given one `Kernels`; it never asks
what device it is on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from trainer.kernels import gpu, library, plain, plain_updates

Kernel = Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One implementation of each operation of plain.py."""

    rms_norm: Kernel = plain.rms_norm
    rms_norm_backward: Kernel = plain.rms_norm_backward
    layer_norm: Kernel = plain.layer_norm
    layer_norm_backward: Kernel = plain.layer_norm_backward
    swiglu: Kernel = plain.swiglu
    swiglu_backward_: Kernel = plain.swiglu_backward_
    gated: Kernel = plain.gated
    gated_backward_: Kernel = plain.gated_backward_
    split_heads: Kernel = plain.split_heads
    join_heads_: Kernel = plain.join_heads_
    rotate: Kernel = plain.rotate
    attention: Kernel = plain.attention
    document_attention: Kernel = plain.document_attention
    scored_attention: Kernel = plain.scored_attention
    dropout: Kernel = plain.dropout
    logit_statistics: Kernel = plain.logit_statistics
    logits_to_gradient_: Kernel = plain.logits_to_gradient_
    adamw_: Kernel = plain_updates.adamw_
    sgd_: Kernel = plain_updates.sgd_
    muon_momentum_: Kernel = plain_updates.muon_momentum_
    muon_apply_: Kernel = plain_updates.muon_apply_
    orthogonalize: Kernel = plain_updates.orthogonalize


PLAIN = Kernels()
LIBRARY = Kernels(
    layer_norm=library.layer_norm,
    layer_norm_backward=library.layer_norm_backward,
    swiglu_backward_=library.swiglu_backward_,
    logits_to_gradient_=library.logits_to_gradient_,
    adamw_=library.adamw_,
    sgd_=library.sgd_,
)
# Calls into a library, or with a file of their own for GPUs.
NOT_COMPILED = ("attention", "document_attention", "scored_attention", "orthogonalize")
# Recomputed from the stored sum; without this the first pass would normalize the sum before it was rounded.
ROUNDED = ("rms_norm", "layer_norm")


@functools.cache
def compiled() -> Kernels:
    """The pointwise operations compiled, at their first call for the shapes of that call."""
    names = [field.name for field in dataclasses.fields(Kernels) if field.name not in NOT_COMPILED]
    options: dict[str, dict[str, Any]] = {name: {"emulate_precision_casts": True} for name in ROUNDED}
    made = {name: torch.compile(getattr(PLAIN, name), options=options.get(name)) for name in names}
    return Kernels(document_attention=gpu.document_attention, scored_attention=gpu.scored_attention, **made)


def choose_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Compiled on a GPU; on a CPU PyTorch's own where it has them, but the plain ones for activations of 16 bits."""
    if device.type == "cuda":
        return compiled()
    return LIBRARY if dtype in (torch.float32, torch.float64) else PLAIN
