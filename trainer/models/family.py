"""The families of models, by the value of `model.family`; no other code names one of them.

A family is a room, trainer/models/NAME/, and its face is the value FAMILY: the rules of its configuration, its shape,
the table of a rank's parameters, its operations per token, the memory of its activations, the cost of a microbatch, the
attention variant of a block, and building a stage. All but the last are pure and import no torch.
docs/howto/add-a-family.md lists what a new one needs.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, cast

from trainer.config.sections import RunConfig
from trainer.kernels.scores import ScoreShape
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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The forward and backward pass of one microbatch through a stage, on one rank.

    Args:
        product_flops: of matrix products. float8_flops: of those in FP8. attention_flops: of attention.
        moved_bytes: read and written by all other kernels.
        sent_bytes: by collectives over tp that are not overlapped.
        passes: runs of a block, forward or backward, including recomputation: each costs the host some time.
    """

    product_flops: float
    float8_flops: float
    attention_flops: float
    moved_bytes: float
    sent_bytes: float
    passes: float


class BuildStage(Protocol):
    """Builds a stage with uninitialized weights; see `build_gpt` of models/gpt/model.py."""

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
    stage_cost: Callable[..., StageCost]
    block_scores: Callable[[Any, int], ScoreShape]
    build: BuildStage


# A family is a separate room, imported when it is used.
FAMILIES: Mapping[str, str] = MappingProxyType({"gpt": "trainer.models.gpt"})


def family_of(config: RunConfig) -> Family:
    """The family that a configuration names."""
    return _family(FAMILIES[config.model.family])


@functools.cache
def _family(module: str) -> Family:
    return cast(Family, importlib.import_module(module).FAMILY)
