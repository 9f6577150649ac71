"""Which layers are computed in FP8: the linear layers of blocks, optionally not of the first and last blocks.

Embeddings, head, norms and attention stay in the dtype of the model.
"""

from __future__ import annotations

import torch
from torch import nn

from trainer.config.sections import RunConfig
from trainer.kernels.float8 import E4M3, E5M2
from trainer.kernels.table import float8_kernels
from trainer.layers.float8_scaling import Float8Kernels, Float8Recipe, Float8Scaling
from trainer.layers.linear import Linear


def use_float8(model: nn.Module, config: RunConfig, *, num_layers: int, device: torch.device) -> Float8Scaling | None:
    """Compute a stage's linear layers in FP8 as configured; None: nothing is in FP8.

    Args:
        model: with its blocks as `blocks`, by their number in the whole model.
        num_layers: blocks of the whole model.

    Raises:
        UsageError: the device has no FP8, or Transformer Engine is missing.
    """
    if config.precision.fp8 == "none":
        return None
    inside = config.precision.float8_blocks(num_layers)
    blocks = model.get_submodule("blocks")
    linears = {
        f"{number}.{name}": layer
        for number, block in blocks.named_children()
        for name, layer in block.named_modules()
        if isinstance(layer, Linear) and int(number) in inside
    }
    parts = dict.fromkeys(name.partition(".")[2] for name in linears)
    names = tuple(f"{number}.{part}" for number in inside for part in parts)
    kernels = Float8Kernels(*float8_kernels(device))
    scaling = Float8Scaling(names, recipe_of(config), kernels=kernels, device=device)
    for name, layer in linears.items():
        layer.float8 = scaling.of(name)
    return scaling


def recipe_of(config: RunConfig) -> Float8Recipe:
    """The FP8 recipe of a configuration."""
    precision = config.precision
    return Float8Recipe(
        delayed=precision.fp8 == "delayed",
        gradients=E5M2 if precision.fp8_format == "hybrid" else E4M3,
        history=precision.fp8_amax_history_len,
        most_recent=precision.fp8_amax_compute == "most_recent",
        margin=precision.fp8_margin,
        input_again=config.recompute.mode == "selective",
    )
