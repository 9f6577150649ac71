"""Memory of one rank: bytes of its state and of activations; and out-of-memory errors that name both.

The bytes of weights, gradients and optimizer state follow from the table of parameters, those of activations from the
shape of the model. `rank_bytes` adds everything up; `mtrain plan` and `mtrain check` both print what it says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

from mdata.errors import counted
from trainer.arithmetic import common_divisors
from trainer.config.sections import PrecisionSection, RecomputeSection, RunConfig
from trainer.errors import FEWER_TOKENS, OutOfMemoryError, out_of_memory_error, out_of_memory_in, size_text
from trainer.kernels.updates import state_names
from trainer.models.family import family_of
from trainer.parallel.buckets import cut_buckets
from trainer.parallel.params import ParamSpec
from trainer.pipeline.actions import peak_live, stages_of
from trainer.plan.plan import Plan
from trainer.plan.stages import rank_buffers, rank_parameters

MODES: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")  # of recomputation
USABLE = 0.94  # usable part of a GPU's memory: CUDA, NCCL and fragmentation take the rest
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}  # of an element of the model's weights


class RankBytes(NamedTuple):
    """The peak memory of a pipeline rank, without memory outside of tensors.

    Args:
        state: weights, gradients, optimizer state, the model's buffers, whole buckets in use and FP8 weights.
        activations: what the microbatches in progress hold for backward.
    """

    state: int
    activations: int

    @property
    def total(self) -> int:
        """Both."""
        return self.state + self.activations


@contextmanager
def explained(config: RunConfig, plan: Plan, *, rank: int) -> Iterator[None]:
    """Add the rank and both estimates to an out-of-memory error in the block."""
    try:
        with out_of_memory_in("training", fix=FEWER_TOKENS):
            yield
    except OutOfMemoryError as error:
        of_rank = f"rank {rank} of {plan.world_size}: " if plan.world_size > 1 else ""
        needs = (
            f"{size_text(state_bytes(config, plan))} of weights, gradients and optimizer state per rank, and for about "
            f"{size_text(activation_bytes(config, plan))} of activations of {plan.micro_batch} x "
            f"{counted(plan.sequence_length, 'token')} (train.micro_batch x .sequence_length, recompute.mode = "
            f'"{config.recompute.mode}")'
        )
        fix = _less_memory(config, plan) if error.fix == FEWER_TOKENS else error.fix
        raise out_of_memory_error(
            f"{of_rank}{error.phase}", found=error.found, fix=fix, needs=needs
        ) from error.__cause__


def _less_memory(config: RunConfig, plan: Plan) -> str:
    """The settings that reduce activations, with the estimate for each, and other advice."""
    tries = {}
    for size in [n for n in common_divisors(plan.micro_batch * plan.num_microbatches) if n < plan.micro_batch][-1:]:
        tries[f"train.micro_batch={size}"] = activation_bytes(config, dataclasses.replace(plan, micro_batch=size))
    for mode in MODES[MODES.index(config.recompute.mode) + 1 :]:
        changed = dataclasses.replace(config, recompute=RecomputeSection(mode=mode))
        tries[f"recompute.mode={mode}"] = activation_bytes(changed, plan)
    shown = [f"{setting} (activations: about {size_text(count)})" for setting, count in tries.items()]
    return ", ".join([*shown, "a shorter train.sequence_length, or a larger mesh.tp, mesh.cp or mesh.pp"])


def state_bytes(config: RunConfig, plan: Plan) -> int:
    """Bytes of the state on the pipeline rank that needs most for it: its memory without activations."""
    return max(rank.state for rank in rank_bytes(config, plan))


def rank_bytes(config: RunConfig, plan: Plan, *, buffer_bytes: Sequence[int] | None = None) -> tuple[RankBytes, ...]:
    """The peak memory of each pipeline rank.

    Args:
        buffer_bytes: of each rank's buffers and optimizer state, if counted on tensors, which have padding; None:
            `kept_bytes` of its parameters.
    """
    of_rank, like = tables(config, plan), alike(plan)
    if buffer_bytes is None:
        of_first = {r: kept_bytes(config, plan, table=of_rank[r]) for r in set(like)}
        buffer_bytes = [of_first[first] for first in like]
    working = {
        r: working_bytes(config, plan, table=of_rank[r]) + model_buffer_bytes(config, plan, r) for r in set(like)
    }
    states = (held + working[first] for held, first in zip(buffer_bytes, like, strict=True))
    return tuple(map(RankBytes, states, activation_bytes_per_stage(config, plan)))


def alike(plan: Plan) -> list[int]:
    """For each pipeline rank the first one with as many parameters and layers: most are alike, which saves time."""
    layout, first = plan.pipeline, dict[tuple[int, ...], int]()
    keys = (
        (held, *(layout.layers_per_stage[stage] for stage in stages_of(layout.stage_ranks, rank)))
        for rank, held in enumerate(plan.parameters_per_stage)
    )
    return [first.setdefault(key, rank) for rank, key in enumerate(keys)]


def tables(config: RunConfig, plan: Plan) -> tuple[tuple[ParamSpec, ...], ...]:
    """The parameters of each pipeline rank."""
    like, family = plan.place(sequence_parallel=config.mesh.sequence_parallel), family_of(config)
    return tuple(rank_parameters(family, plan.shape, places=plan.pipeline.places(r, like)) for r in range(plan.pp))


def kept_bytes(config: RunConfig, plan: Plan, *, table: Sequence[ParamSpec]) -> int:
    """Bytes of the buffers and the optimizer state that a rank with these parameters holds from step to step."""
    weight, gradient = element_bytes(config.precision)
    main, total = max(weight, 4), 0
    same_tensor = weight == main  # parameters that are not rounded are the main weights
    sharding, ranks = config.optimizer.sharding, {"data": plan.cp * plan.dp, "edp": plan.edp}
    for spec in table:
        states = len(state_names(config.optimizer.name, matrix=spec.matrix)) - same_tensor
        share = -(-spec.numel // ranks[spec.shard])
        total += weight * (share if sharding == "parameters" else spec.numel)
        if spec.frozen:
            continue
        total += gradient * (share if sharding in ("gradients", "parameters") else spec.numel)
        total += states * main * (spec.numel if sharding == "none" else share)
    return total


def working_bytes(config: RunConfig, plan: Plan, *, table: Sequence[ParamSpec]) -> int:
    """Bytes beside `kept_bytes` and activations during a step: buckets in use, FP8 weights.

    A rank without others along data keeps whole buffers, whatever optimizer.sharding says.
    """
    buckets = in_use_bytes(config, table) if plan.cp * plan.dp > 1 else 0
    return buckets + float8_bytes(config.precision, plan, table=table)


def model_buffer_bytes(config: RunConfig, plan: Plan, rank: int) -> int:
    """Bytes of state that is no parameter, of a pipeline rank: fp32, whole on each rank."""
    places = plan.pipeline.places(rank, plan.place())
    return 4 * sum(spec.numel for spec in rank_buffers(family_of(config), plan.shape, places=places))


def in_use_bytes(config: RunConfig, table: Sequence[ParamSpec]) -> int:
    """Peak bytes of whole buckets in addition to `kept_bytes`: the one in use, and one in transit.

    With a backward pass in two halves, all gradients are in use from the first half to the second.
    """
    optimizer = config.optimizer
    if optimizer.sharding not in ("gradients", "parameters"):
        return 0
    buckets = list(cut_buckets(table, bucket_size=optimizer.bucket_size or 0))
    sizes = [sum(spec.numel for spec in bucket) for bucket in buckets]
    trained = [size for size, bucket in zip(sizes, buckets, strict=True) if not bucket[0].frozen]
    weight, gradient = element_bytes(config.precision)
    split = config.mesh.schedule.startswith("zb") and config.mesh.pp > 1
    parameters = weight * _in_use(sizes, optimizer.overlap_param_gather) * (optimizer.sharding == "parameters")
    gradients = gradient * (sum(trained) if split else _in_use(trained, optimizer.overlap_grad_reduce))
    return parameters + gradients


def _in_use(sizes: Sequence[int], overlap: bool) -> int:
    """The largest bucket, or the largest two neighbours."""
    return max(map(sum, zip(sizes, [*sizes[1:], 0], strict=True))) if overlap else max(sizes)


def element_bytes(precision: PrecisionSection) -> tuple[int, int]:
    """Bytes of a weight, and of its gradient."""
    weight = BYTES[precision.dtype]
    return weight, weight if precision.gradients == "params" else max(weight, 4)


def float8_bytes(precision: PrecisionSection, plan: Plan, *, table: Sequence[ParamSpec]) -> int:
    """Bytes of the FP8 weights that a rank keeps during a step: each, and its transpose."""
    num_layers = plan.shape.num_layers
    matrices = sum(spec.numel for spec in table if _is_in_float8(spec))
    return 2 * matrices * len(precision.float8_blocks(num_layers)) // num_layers


def _is_in_float8(spec: ParamSpec) -> bool:
    """Whether a parameter is the matrix of a linear layer of a block; routers and gates compute in fp32."""
    routes = spec.name.endswith((".router.weight", ".shared_gate.weight"))
    return spec.name.startswith("blocks.") and len(spec.shape) == 2 and not routes


def activation_bytes(config: RunConfig, plan: Plan) -> int:
    """Peak bytes that the microbatches in progress hold for backward on a rank, as the model's family counts them."""
    return max(activation_bytes_per_stage(config, plan))


def activation_bytes_per_stage(config: RunConfig, plan: Plan) -> tuple[int, ...]:
    """The same for each pipeline rank."""
    family = family_of(config)
    like = plan.place(sequence_parallel=config.mesh.sequence_parallel)
    of_scan = {"scan": config.kernels.scan} if family.scans(plan.shape) else {}
    of_stage = {
        place.stage: family.activation_bytes(
            plan.shape,
            place,
            tokens=plan.micro_batch * plan.sample_tokens // plan.cp,
            cp=plan.cp,
            element=BYTES[config.precision.dtype],
            recompute=config.recompute,
            float8=config.precision.fp8 != "none",
            **of_scan,
        )
        for rank in range(plan.pp)
        for place in plan.pipeline.places(rank, like)
    }
    schedule = plan.pipeline.computations(min(plan.num_microbatches, _steady(plan)))
    return tuple(peak_live(actions, of_stage) for actions in schedule.actions)


def _steady(plan: Plan) -> int:
    """Number of microbatches after which a schedule's memory no longer grows; gpipe keeps all of them."""
    return plan.num_microbatches if plan.pipeline.schedule == "gpipe" else 4 * plan.pp
