"""Runs that give the same bits when they are repeated on the same GPUs: `run.deterministic`.

On CPUs every run does. On GPUs some kernels add in the order in which their threads finish; PyTorch has alternatives
for most of them, and raises an error that names the operation if it has none. Libraries are configured by environment
variables, which have to be set before their first use; values set by the user are kept. What is unusual: torch.compile
must compile a kernel for each shape. By default it compiles one kernel for all shapes when it sees a second shape; from
then on that kernel also runs for the first shape, and rounds differently, so the first step after a restart would
differ from that of an uninterrupted run. It also times two block sizes of each pointwise kernel, also where
TORCHINDUCTOR_DETERMINISTIC forbids it for reductions; the two round differently where a b + c d is fused, so ranks and
restarted processes could differ.
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
COMPILED_SHAPES = 4096  # compiled versions of one function; further shapes would run uncompiled


def make_deterministic(config: RunConfig) -> None:
    """Choose deterministic kernels for this process if run.deterministic is set; call before it uses a GPU."""
    if not config.run.deterministic:
        return
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    import torch
    import torch._dynamo
    import torch._inductor.config

    torch._inductor.config.triton.autotune_pointwise = False
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.specialize_float = True
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = COMPILED_SHAPES
    torch.use_deterministic_algorithms(True)
    # Filling memory that is written before it is read would only take time.
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010, its stub has no such name
