"""`kernels.tensor_parallel = "symmetric_memory"`: all linear layers of a model share one rank's symmetric products.

The head and the embedding keep plain collectives: they are one product each in a whole model.
"""

from __future__ import annotations

import torch
from torch import nn

from trainer.config.sections import RunConfig
from trainer.layers.linear import Linear
from trainer.parallel.collectives import Group
from trainer.parallel.symmetric_products import open_symmetric_products, workspace_bytes


def use_symmetric_products(
    model: nn.Module, config: RunConfig, *, tp: Group, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Let the linear layers compute as the configuration says; every rank of the group has to call this.

    Args:
        model: the stages of one rank.
        num_tokens: of a microbatch, on all ranks of the group.

    Raises:
        UsageError: the GPUs cannot share memory, or compute something else.
    """
    if config.kernels.tensor_parallel == "auto" or device.type == "meta":
        return
    size = workspace_bytes(num_tokens, config.model.hidden_size, group_size=tp.size, dtype=dtype)
    products = open_symmetric_products(tp, workspace_bytes=size, device=device, dtype=dtype)
    for layer in model.modules():
        if isinstance(layer, Linear) and layer.parallel.sequence_parallel:
            layer.parallel.products = products
