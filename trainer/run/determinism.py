"""Runs that give the same bits when they are done again on the same GPUs: `run.deterministic`.

On CPUs a run always does. On GPUs some kernels add in the order in which their threads come; PyTorch has others for
most of them, and raises an error that names the operation where it has none. Libraries are asked by variables of the
environment, which have to be set before their first use; what the user has set stays.
"""

from __future__ import annotations

import os
from types import MappingProxyType

from trainer.config.sections import RunConfig

VARIABLES = MappingProxyType(
    {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # NVIDIA cuBLAS, "Results reproducibility"
        "NCCL_ALGO": "Ring",  # the choice between algorithms may depend on timings
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # Transformer Engine's attention
        "TORCHINDUCTOR_DETERMINISTIC": "1",  # no choice between kernels by their speed
    }
)


def make_deterministic(config: RunConfig) -> None:
    """Choose deterministic kernels for this process where run.deterministic says so; before it uses a GPU."""
    if not config.run.deterministic:
        return
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    import torch

    torch.use_deterministic_algorithms(True)
    # Filling memory that is written before it is read would only cost time.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010, its stub has no such name
