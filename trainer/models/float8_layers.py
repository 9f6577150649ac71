"""Which layers are computed in FP8: the linear layers of blocks, optionally not of the first and last blocks.

Embeddings, head, norms, attention and experts stay in the dtype of the model; a shared expert is two linear layers.
Training keeps weights in that dtype, too, and rounds them for each step; a model that is only used may keep them in FP8
alone, and those of experts too.
"""

from __future__ import annotations

import torch
from torch import nn

from mdata import UsageError
from mdata.errors import counted
from trainer.config.sections import RunConfig
from trainer.kernels.float8 import E4M3, E5M2, MULTIPLE
from trainer.kernels.table import float8_grouped_kernel, float8_kernels, float8_rows_kernels
from trainer.layers.experts import Experts
from trainer.layers.float8_scaling import Float8Kernels, Float8Recipe, Float8Scaling
from trainer.layers.linear import Float8RowsKernels, Linear


def use_float8(
    model: nn.Module, config: RunConfig, *, whole: nn.Module, num_layers: int, device: torch.device
) -> Float8Scaling | None:
    """Compute a stage's linear layers in FP8 as configured; None: nothing is in FP8.

    Args:
        model: with its blocks as `blocks`, by their number in the whole model.
        whole: the same with all blocks, which need no memory: those of other ranks may have other layers.
        num_layers: blocks of the whole model.

    Raises:
        UsageError: the device has no FP8, or Transformer Engine is missing.
    """
    if config.precision.fp8 == "none":
        return None
    inside = config.precision.float8_blocks(num_layers)
    recipe = recipe_of(config)
    kernels = Float8Kernels(*float8_kernels(device, blocks=recipe.blocks))
    scaling = Float8Scaling(tuple(_linears(whole, inside)), recipe, kernels=kernels, device=device)
    for name, layer in _linears(model, inside).items():
        layer.float8 = scaling.of(name)
    return scaling


def _linears(model: nn.Module, inside: range) -> dict[str, Linear]:
    """The linear layers of some blocks, by name."""
    return {
        f"{number}.{name}": layer
        for number, block in model.get_submodule("blocks").named_children()
        for name, layer in block.named_modules()
        if isinstance(layer, Linear) and int(number) in inside
    }


def recipe_of(config: RunConfig) -> Float8Recipe:
    """The FP8 recipe of a configuration."""
    precision = config.precision
    return Float8Recipe(
        delayed=precision.fp8 == "delayed",
        blocks=precision.fp8 == "blockwise",
        gradients=E5M2 if precision.fp8_format == "hybrid" else E4M3,
        history=precision.fp8_amax_history_len,
        most_recent=precision.fp8_amax_compute == "most_recent",
        margin=precision.fp8_margin,
        input_again=config.recompute.mode == "selective",
    )


def keep_float8_weights(model: nn.Module, *, device: torch.device) -> None:
    """Keep the weights of a stage's linear layers and experts in FP8, in place of its dtype; it only runs forward then.

    Raises:
        UsageError: the device, the dtype or the widths do not allow it, or there are no such layers.
    """
    linears = [layer for layer in model.modules() if isinstance(layer, Linear)]
    on_gpu, fix = device.type == "cuda", "leave out --weights fp8"
    if not linears:
        raise UsageError("weights in FP8 are those of linear layers, and the model has none", fix=fix)
    if on_gpu and (dtype := linears[0].weight.dtype) != torch.bfloat16:
        raise UsageError(f"on a GPU weights in FP8 need --dtype bf16, not {str(dtype).removeprefix('torch.')}", fix=fix)
    odd = next((layer for layer in linears if any(width % MULTIPLE for width in layer.weight.shape)), None)
    if on_gpu and odd is not None:
        raise UsageError(
            "a GPU cannot multiply a weight of this shape in FP8",
            found=f"{odd.weight.shape[0]} outputs and {counted(odd.weight.shape[1], 'input')} on a rank",
            expected=f"multiples of {MULTIPLE}",
            fix=f"fewer ranks along tp, or {fix}",
        )
    kernels = Float8RowsKernels(*float8_rows_kernels(device))
    if any(isinstance(layer, Experts) for layer in model.modules()):
        kernels = kernels._replace(grouped=float8_grouped_kernel(device))
    for layer in model.modules():
        if isinstance(layer, Linear | Experts):
            layer.keep_rows(kernels)
    if on_gpu:
        torch.cuda.empty_cache()  # the cache of keys and values takes what is free
