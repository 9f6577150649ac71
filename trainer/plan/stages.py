"""How the layers of a model are divided into pipeline stages, and the stages over ranks.

Layers are divided into equal numbers, into stages of equal operations (counting the head as a number of layers; an
embedding is a lookup and does not count), or as a user sets. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

from trainer.config.sections import MeshSection, RunConfig
from trainer.models.family import Family, ModelShape, family_of
from trainer.parallel.params import ParamSpec, Place, equal_layers
from trainer.pipeline.actions import Schedule, stages_of
from trainer.pipeline.generators import default_chunks, forward_only, make_schedule, placement
from trainer.pipeline.lower import lower
from trainer.pipeline.simulate import Costs, Timeline, simulate

STEADY = 2  # rounds of as many microbatches as ranks, after which a step repeats itself


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PipelineLayout:
    """The pipeline of a run.

    Args:
        schedule: name of the generator. chunks: stages of each rank.
        stage_ranks: pipeline rank of each stage. layers_per_stage: blocks of each stage.
        stage_costs: operations of a forward pass through each stage, in layers; includes the head.
    """

    schedule: str
    chunks: int
    stage_ranks: tuple[int, ...]
    layers_per_stage: tuple[int, ...]
    stage_costs: tuple[float, ...]

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return max(self.stage_ranks) + 1

    def places(self, rank: int, like: Place) -> tuple[Place, ...]:
        """A pipeline rank's stages.

        Args:
            like: gives the rank's position on the other axes.
        """
        return tuple(
            dataclasses.replace(
                like,
                stage=stage,
                num_stages=len(self.stage_ranks),
                layers_per_stage=self.layers_per_stage,
                ends_apart=self.stage_ranks[0] != self.stage_ranks[-1],
            )
            for stage in stages_of(self.stage_ranks, rank)
        )

    def lowered(self, num_microbatches: int) -> Schedule:
        """The actions of all ranks in a step, with communication."""
        return _lowered(self.schedule, self.num_ranks, num_microbatches, self.chunks)

    def step_seconds(self, num_microbatches: int, costs: Costs) -> float:
        """Time of a step; a long one is extrapolated from two shorter ones."""
        few, more = STEADY * self.num_ranks, (STEADY + 1) * self.num_ranks
        if num_microbatches <= more:
            return simulate(self.lowered(num_microbatches), costs).step
        first, second = (simulate(self.lowered(count), costs).step for count in (few, more))
        return second + (num_microbatches - more) * (second - first) / (more - few)

    def timeline(self, num_microbatches: int) -> Timeline:
        """The timeline of a step if each half of backward took as long as forward; unit: the shortest stage's time."""
        least = min(self.stage_costs)
        each = tuple(cost / least for cost in self.stage_costs)
        return simulate(self.lowered(num_microbatches), Costs(forward=each, inputs=each, weights=each))

    def forward(self, num_microbatches: int) -> Schedule:
        """The actions of all ranks in an evaluation."""
        return lower(forward_only(self.stage_ranks, num_microbatches))


@functools.lru_cache(maxsize=256)
def _lowered(name: str, num_ranks: int, num_microbatches: int, chunks: int, /) -> Schedule:
    return lower(make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, chunks=chunks))


def num_chunks(mesh: MeshSection) -> int:
    """Stages of each pipeline rank."""
    return mesh.virtual_pipeline or default_chunks(mesh.schedule)


def pipeline_layout(config: RunConfig, shape: ModelShape) -> PipelineLayout:
    """The pipeline of a valid configuration."""
    mesh, chunks = config.mesh, num_chunks(config.mesh)
    num_stages = mesh.pp * chunks
    layers, head = mesh.layers_per_stage, head_layers(config, shape)
    if not layers and mesh.stage_balance == "flops":
        layers = balanced_layers(shape.num_layers, num_stages, head=head)
    layers = layers or equal_layers(shape.num_layers, num_stages)
    return PipelineLayout(
        schedule=mesh.schedule,
        chunks=chunks,
        stage_ranks=placement(mesh.schedule, mesh.pp, chunks=chunks),
        layers_per_stage=layers,
        stage_costs=(*layers[:-1], layers[-1] + head),
    )


def head_layers(config: RunConfig, shape: ModelShape) -> float:
    """The operations after the last layer, in layers."""
    family = family_of(config)
    one, two = (
        family.flops_per_token(dataclasses.replace(shape, num_layers=n), config.train.sequence_length)  # type: ignore[type-var]
        for n in (1, 2)
    )
    return (2 * one - two) / (two - one)


def balanced_layers(num_layers: int, num_stages: int, *, head: float) -> tuple[int, ...]:
    """Blocks of each stage, at least one, so that the longest stage is as short as possible.

    Args:
        head: the head's operations, in layers; it is in the last stage.
    """
    if num_stages == 1:
        return (num_layers,)

    def longest(last: int) -> float:
        return max(last + head, -(-(num_layers - last) // (num_stages - 1)))

    most = num_layers // num_stages  # no more than without a head
    last = min(range(most, 0, -1), key=longest)
    return (*equal_layers(num_layers - last, num_stages - 1), last)


def rank_parameters(family: Family, shape: ModelShape, *, places: Sequence[Place]) -> tuple[ParamSpec, ...]:
    """The parameters of all stages of a rank; those that two stages share (a tied embedding) once."""
    return _rank_parameters(family.parameters, cast(Hashable, shape), tuple(places))


@functools.lru_cache(maxsize=1024)
def _rank_parameters(
    parameters: Callable[[Any, Place], tuple[ParamSpec, ...]], shape: Hashable, places: tuple[Place, ...], /
) -> tuple[ParamSpec, ...]:
    tables = [parameters(shape, place) for place in places]
    found = {spec.name: spec for table in reversed(tables) for spec in table}
    return tuple({spec.name: found[spec.name] for table in tables for spec in table}.values())
