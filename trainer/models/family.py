"""The families of models, by the name that `model.family` has; nothing outside this room names one of them.

A family is ten functions: the rules of its configuration, its shape, the table of a rank's parameters, its operations
per token, the memory of its activations, what a microbatch costs, what attention does in a block, and the building of a
stage. All but the last are pure and import no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from trainer.config.sections import RunConfig
from trainer.kernels.scores import ScoreShape
from trainer.models import gpt_check, gpt_cost, gpt_memory, gpt_params, gpt_shape
from trainer.parallel.params import ParamSpec, Place


class ModelShape(Protocol):
    """What every family's shape has; a frozen dataclass."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    padded_vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of models.

    Args:
        shape: (configuration, entries of the vocabulary) to all numbers that define the function.
        problems: configuration to what clashes in it, a line each.
        cut_by_tp: configuration to the sizes that tensor parallelism cuts, by the names that users know.
        float8_sizes: configuration to rows and columns of the matrices of linear layers.
        parameters: (shape, place) to the parameters of the rank there, in the order of the module tree.
        flops_per_token: (shape, sequence length) to operations of forward and backward.
        activation_bytes: (shape, place, tokens, element, recompute, float8) to the most that a microbatch holds.
        stage_cost: (shape, place, **microbatch) to what its forward and backward pass cost a rank.
        block_scores: (shape, number of a block) to what its attention does to scores.
        build: (shape, place, **how) to a stage with uninitialized weights.
    """

    shape: Callable[[RunConfig, int], Any]
    problems: Callable[[RunConfig], Iterator[str]]
    cut_by_tp: Callable[[RunConfig], dict[str, int]]
    float8_sizes: Callable[[RunConfig], dict[str, int]]
    parameters: Callable[[Any, Place], tuple[ParamSpec, ...]]
    flops_per_token: Callable[[Any, int], int]
    activation_bytes: Callable[..., int]
    stage_cost: Callable[..., gpt_cost.StageCost]
    block_scores: Callable[[Any, int], ScoreShape]
    build: Callable[..., Any]


def family_of(config: RunConfig) -> Family:
    """The family that a configuration names."""
    return FAMILIES[config.model.family]


def _build_gpt(*arguments: Any, **options: Any) -> Any:
    from trainer.models.gpt import build_gpt  # torch is imported where a model is built, not where a run is planned

    return build_gpt(*arguments, **options)


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
