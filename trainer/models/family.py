"""The families of models, by the value of `model.family`; no code outside this room names one of them.

A family is ten functions: the rules of its configuration, its shape, the table of a rank's parameters, its operations
per token, the memory of its activations, the cost of a microbatch, the attention variant of a block, and building a
stage. All but the last are pure and import no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from trainer.config.sections import RunConfig
from trainer.kernels.scores import ScoreShape
from trainer.models import gpt_check, gpt_cost, gpt_memory, gpt_params, gpt_shape
from trainer.parallel.params import ParamSpec, Place

if TYPE_CHECKING:
    import torch

    from trainer.parallel.collectives import Group


class ModelShape(Protocol):
    """The fields that every family's shape has; a frozen dataclass."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    padded_vocab_size: int


class BuildStage(Protocol):
    """Builds a stage with uninitialized weights; see `build_gpt`."""

    def __call__(
        self,
        shape: Any,
        place: Place,
        /,
        *,
        groups: Mapping[str, Group],
        dtype: torch.dtype,
        device: torch.device,
        config: RunConfig | None = None,
        allocate: bool = True,
    ) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models.

    Args:
        shape: (configuration, entries of the vocabulary) -> all numbers that define the function.
        problems: configuration -> its conflicts, one line each.
        cut_by_tp: configuration -> the sizes that tensor parallelism divides, by their setting names.
        float8_sizes: configuration -> rows and columns of the matrices of linear layers.
        parameters: (shape, place) -> the parameters of that rank, in the order of the module tree.
        flops_per_token: (shape, document lengths, see `Plan`) -> operations of forward and backward.
        activation_bytes: (shape, place, tokens, element, recompute, float8) -> peak bytes of a microbatch.
        stage_cost: (shape, place, **microbatch) -> the cost of its forward and backward pass on a rank.
        block_scores: (shape, number of a block) -> how its attention changes scores.
        build: a stage with uninitialized weights.
    """

    shape: Callable[[RunConfig, int], Any]
    problems: Callable[[RunConfig], Iterator[str]]
    cut_by_tp: Callable[[RunConfig], dict[str, int]]
    float8_sizes: Callable[[RunConfig], dict[str, int]]
    parameters: Callable[[Any, Place], tuple[ParamSpec, ...]]
    flops_per_token: Callable[[Any, tuple[int, ...]], int]
    activation_bytes: Callable[..., int]
    stage_cost: Callable[..., gpt_cost.StageCost]
    block_scores: Callable[[Any, int], ScoreShape]
    build: BuildStage


def family_of(config: RunConfig) -> Family:
    """The family that a configuration names."""
    return FAMILIES[config.model.family]


def _build_gpt(
    shape: Any,
    place: Place,
    *,
    groups: Mapping[str, Group],
    dtype: torch.dtype,
    device: torch.device,
    config: RunConfig | None = None,
    allocate: bool = True,
) -> Any:
    from trainer.models.gpt import build_gpt  # torch is imported when a model is built, not when a run is planned

    return build_gpt(shape, place, groups=groups, dtype=dtype, device=device, config=config, allocate=allocate)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt": Family(
            shape=gpt_shape.gpt_shape,
            problems=gpt_check.model_problems,
            cut_by_tp=gpt_check.cut_by_tp,
            float8_sizes=gpt_check.float8_sizes,
            parameters=gpt_params.parameter_table,
            flops_per_token=gpt_cost.flops_per_token,
            activation_bytes=gpt_memory.activation_bytes,
            stage_cost=gpt_cost.stage_cost,
            block_scores=gpt_shape.block_scores,
            build=_build_gpt,
        )
    }
)
