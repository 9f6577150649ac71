"""Runs that give the same bits when they are done again on the same GPUs: `run.deterministic`.

On CPUs a run always does. On GPUs some kernels add in the order in which their threads come; PyTorch has others for
most of them, and raises an error that names the operation where it has none. Libraries are asked by variables of the
environment, which have to be set before their first use; what the user has set stays. What is unusual: torch.compile
must make a kernel for each shape. By default a second shape makes it compile one for all shapes, which from then on
runs for the first shape, too, and rounds differently: the first step after a start would not be that of a run that
goes on.
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
COMPILED_SHAPES = 4096  # of one function; more would run uncompiled


def make_deterministic(config: RunConfig) -> None:
    """Choose deterministic kernels for this process where run.deterministic says so; before it uses a GPU."""
    if not config.run.deterministic:
        return
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    import torch
    import torch._dynamo

    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.specialize_float = True
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = COMPILED_SHAPES
    torch.use_deterministic_algorithms(True)
    # Filling memory that is written before it is read would only cost time.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010, its stub has no such name
