"""Memory of one rank: bytes of its state and of activations, and errors of memory that ran out with both.

The bytes of weights, gradients and optimizer state follow from the table of parameters, those of activations from the
shape of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trainer.config.sections import RunConfig
from trainer.errors import FEWER_TOKENS, OutOfMemoryError, out_of_memory_error, out_of_memory_in, size_text
from trainer.kernels.updates import state_names
from trainer.models.family import family_of
from trainer.parallel.params import Place
from trainer.plan.plan import Plan

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}  # of an element of the model's weights


@contextmanager
def explained(config: RunConfig, plan: Plan, *, rank: int) -> Iterator[None]:
    """Add the rank and both estimates to an error of memory that ran out in the block."""
    try:
        with out_of_memory_in("training", fix=FEWER_TOKENS):
            yield
    except OutOfMemoryError as error:
        of_rank = f"rank {rank} of {plan.world_size}: " if plan.world_size > 1 else ""
        needs = (
            f"{size_text(state_bytes(config, plan))} of weights, gradients and optimizer state per rank, and for about "
            f"{size_text(activation_bytes(config, plan))} of activations of {plan.micro_batch} x "
            f"{plan.sequence_length} tokens (train.micro_batch x .sequence_length, recompute.mode = "
            f'"{config.recompute.mode}")'
        )
        raise out_of_memory_error(
            f"{of_rank}{error.phase}", found=error.found, fix=error.fix, needs=needs
        ) from error.__cause__


def state_bytes(config: RunConfig, plan: Plan) -> int:
    """Bytes of a rank's weights, main gradients, main weights and moments: what it needs before any activation."""
    weight = BYTES[config.precision.dtype]
    main, total = max(weight, 4), 0
    gradient = weight if config.precision.gradients == "params" else main
    for spec in family_of(config).parameters(plan.shape, Place(tp_size=plan.tp)):
        states = len(state_names(config.optimizer.name, matrix=spec.matrix))
        total += spec.numel * (weight + gradient) + states * main * -(-spec.numel // (plan.cp * plan.dp))
    return total + float8_bytes(config, plan)


def float8_bytes(config: RunConfig, plan: Plan) -> int:
    """Bytes of the weights in FP8 that a rank keeps through a step: each, and its transpose."""
    precision, num_layers = config.precision, plan.shape.num_layers
    if precision.fp8 == "none":
        return 0
    table = family_of(config).parameters(plan.shape, Place(tp_size=plan.tp))
    matrices = sum(spec.numel for spec in table if spec.name.startswith("blocks.") and len(spec.shape) == 2)
    return 2 * matrices * (num_layers - 2 * precision.fp8_first_last_bf16) // num_layers


def activation_bytes(config: RunConfig, plan: Plan) -> int:
    """Most bytes that a microbatch holds for backward on a rank, as the model's family counts them."""
    return family_of(config).activation_bytes(
        plan.shape,
        Place(tp_size=plan.tp, sequence_parallel=config.mesh.sequence_parallel),
        tokens=plan.micro_batch * plan.sequence_length // plan.cp,
        cp=plan.cp,
        element=BYTES[config.precision.dtype],
        recompute=config.recompute,
        float8=config.precision.fp8 != "none",
    )
