"""Rules of [precision] and [kernels]: requirements of FP8, and which kernels fit the run.

Whether the machine has the libraries is not checked here: a run that names one finds out when it starts. Pure, no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.sections import PrecisionSection, RunConfig
from trainer.models.arithmetic import round_up
from trainer.models.family import family_of

MULTIPLE = 16  # of every dimension of a product of FP8 matrices: required by cuBLAS
DELAYED_KEYS = ("fp8_amax_history_len", "fp8_amax_compute", "fp8_margin")
FP8_KEYS = ("fp8_format", "fp8_first_last_bf16", *DELAYED_KEYS)


def precision_problems(config: RunConfig) -> Iterator[str]:
    """One line for each setting of [precision] that conflicts with others, the model or the batch."""
    precision, default = config.precision, PrecisionSection()
    idle = FP8_KEYS if precision.fp8 == "none" else DELAYED_KEYS if precision.fp8 == "current" else ()
    for key in idle:
        if (value := getattr(precision, key)) != getattr(default, key):
            yield (
                f'precision.{key}={value!r} has no effect with precision.fp8="{precision.fp8}"; '
                'leave it out, or set precision.fp8="delayed"'
            )
    if precision.fp8 == "none":
        return
    if precision.dtype != "bf16":
        yield (
            f'precision.fp8="{precision.fp8}" needs precision.dtype="bf16", the type of everything but the products of '
            f'linear layers, not "{precision.dtype}"; set precision.dtype="bf16"'
        )
    bf16 = 2 * precision.fp8_first_last_bf16
    if bf16 >= config.model.num_layers:
        yield (
            f"precision.fp8_first_last_bf16={precision.fp8_first_last_bf16} at both ends leaves no layer of "
            f'model.num_layers={config.model.num_layers} in FP8; lower it, or set precision.fp8="none"'
        )
    for what, size in family_of(config).float8_sizes(config).items():
        if size % MULTIPLE:
            yield (
                f"{what} is {size}, but FP8 matrices must have multiples of {MULTIPLE} rows and columns; "
                f'choose {round_up(size, MULTIPLE)}, or set precision.fp8="none"'
            )


def why_not_recorded(config: RunConfig, *, data_parallel: int) -> str:
    """Why CUDA graphs cannot launch the passes of this run (pipeline/graphs.py); "" if they can.

    Args:
        data_parallel: ranks that share parameters, those of context parallelism included.
    """
    sharding = config.optimizer.sharding
    if data_parallel > 1 and sharding in ("gradients", "parameters"):
        return f'optimizer.sharding="{sharding}" moves buffers during a step'
    if config.kernels.tensor_parallel == "symmetric_memory":
        return 'kernels.tensor_parallel="symmetric_memory" waits for other GPUs inside its kernels'
    if config.data.document_masks or config.data.kind == "packed":
        return "the number of document bounds differs between microbatches"
    return ""


def why_not_beside(config: RunConfig) -> str:
    """Why passes of two microbatches cannot run beside each other; "" if they can."""
    if config.kernels.cuda_graphs != "on":
        return 'it needs kernels.cuda_graphs="on"'
    if config.mesh.pp > 1:
        return f"passes of a pipeline wait for messages, and mesh.pp is {config.mesh.pp}"
    if config.model.tie_embeddings:
        return "with model.tie_embeddings both passes add to the gradient of the embedding"
    return "" if config.mesh.schedule == "1f1b" else f'mesh.schedule is "{config.mesh.schedule}", not "1f1b"'


def kernel_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """One line for each named kernel that does not support its use in this run."""
    kernels, family = config.kernels, family_of(config)
    data_parallel = world_size // (config.mesh.tp * config.mesh.pp)
    if kernels.cuda_graphs == "on" and (reason := why_not_recorded(config, data_parallel=data_parallel)):
        yield f'kernels.cuda_graphs="on" cannot be used: {reason}; set kernels.cuda_graphs="auto"'
    if kernels.overlap_passes == "on" and (reason := why_not_beside(config)):
        yield f'kernels.overlap_passes="on" cannot be used: {reason}; set kernels.overlap_passes="auto"'
    if kernels.optimizer == "apex" and config.optimizer.name != "adamw":
        yield (
            f'kernels.optimizer="apex" supports only optimizer.name="adamw", not "{config.optimizer.name}"; '
            'set kernels.optimizer="auto"'
        )
    if kernels.tensor_parallel != "auto":
        yield from _symmetric_problems(config)
    if kernels.attention == "auto":
        return
    if config.mesh.cp > 1:
        yield (
            f'kernels.attention="{kernels.attention}" with mesh.cp={config.mesh.cp}; it does not support rows that '
            'ranks share: set kernels.attention="auto", or mesh.cp=1'
        )
    shape = family.shape(config, config.model.vocab_size or 1)
    ordinary = any(family.block_scores(shape, block).is_ordinary for block in range(config.model.num_layers))
    if config.data.document_masks or not ordinary:
        what = "data.document_masks" if config.data.document_masks else "these options of the model"
        yield (
            f'kernels.attention="{kernels.attention}" supports only causal attention over whole rows, '
            f'which no layer has with {what}; set kernels.attention="auto"'
        )


def _symmetric_problems(config: RunConfig) -> Iterator[str]:
    if config.mesh.tp == 1 or not config.mesh.sequence_parallel:
        yield (
            'kernels.tensor_parallel="symmetric_memory" has no effect without sequence parallelism; '
            'set mesh.sequence_parallel=true with mesh.tp of at least 2, or kernels.tensor_parallel="auto"'
        )
    if config.precision.fp8 != "none":
        yield (
            f'kernels.tensor_parallel="symmetric_memory" does not support precision.fp8="{config.precision.fp8}"; '
            'set kernels.tensor_parallel="auto"'
        )
