"""How the layers of a model are divided into pipeline stages, and the stages over ranks.

Layers are divided into equal numbers, into stages of equal work, or as a user sets. For equal work the head counts by
its operations and the embedding by the memory that it moves: a lookup has no operations, but its rows are read and
written, and their gradients added. Layers of several kinds count by the work of their kind. Not counted are
collectives, and what happens once a step, such as the sum of a tied embedding's two gradients. Pure.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from trainer.config.sections import MeshSection, RecomputeSection, RunConfig
from trainer.models.family import Family, ModelShape, family_of
from trainer.parallel.params import ParamSpec, Place, equal_layers, num_elements
from trainer.pipeline.actions import Schedule, stages_of
from trainer.pipeline.generators import default_chunks, forward_only, make_schedule, placement
from trainer.pipeline.lower import lower
from trainer.pipeline.simulate import Costs, Timeline, simulate

STEADY = 2  # rounds of as many microbatches as ranks, after which a step repeats itself

# Bytes of a feature of a token in an embedding: a row read and written, its gradient read, all in 16 bits, and the main
# gradient's row in fp32 read and written.
LOOKUP_BYTES = 3 * 2 + 2 * 4
OPERATIONS_PER_BYTE = 270  # of products, in the time in which an H100 moves a byte; rates of plan/devices.py


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PipelineLayout:
    """The pipeline of a run.

    Args:
        schedule: name of the generator. chunks: stages of each rank.
        ahead: additional forward passes before each backward pass, which then run beside it.
        stage_ranks: pipeline rank of each stage. layers_per_stage: blocks of each stage.
        stage_costs: work of a forward pass through each stage, in layers; includes the embedding and the head.
    """

    schedule: str
    chunks: int
    stage_ranks: tuple[int, ...]
    layers_per_stage: tuple[int, ...]
    stage_costs: tuple[float, ...]
    ahead: int = 0

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return max(self.stage_ranks) + 1

    def places(self, rank: int, like: Place) -> tuple[Place, ...]:
        """A pipeline rank's stages."""
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
        return _lowered(self.schedule, self.num_ranks, num_microbatches, self.chunks, self.ahead)

    def computations(self, num_microbatches: int) -> Schedule:
        """The same without communication and without the check for deadlocks: enough for times and memory."""
        return _computations(self.schedule, self.num_ranks, num_microbatches, self.chunks, self.ahead)

    def step_seconds(self, num_microbatches: int, costs: Costs) -> float:
        """Time of a step; a long one is extrapolated from two shorter ones."""
        few, more = STEADY * self.num_ranks, (STEADY + 1) * self.num_ranks
        if num_microbatches <= more:
            return simulate(self.computations(num_microbatches), costs).step
        first, second = (simulate(self.computations(count), costs).step for count in (few, more))
        return second + (num_microbatches - more) * (second - first) / (more - few)

    def timeline(self, num_microbatches: int) -> Timeline:
        """The timeline of a step if each half of backward took as long as forward; unit: the shortest stage's time."""
        least = min(self.stage_costs)
        each = tuple(cost / least for cost in self.stage_costs)
        return simulate(self.computations(num_microbatches), Costs(forward=each, inputs=each, weights=each))

    def forward(self, num_microbatches: int) -> Schedule:
        """The actions of all ranks in an evaluation."""
        return lower(forward_only(self.stage_ranks, num_microbatches))


@functools.lru_cache(maxsize=16)
def _lowered(name: str, num_ranks: int, num_microbatches: int, chunks: int, ahead: int, /) -> Schedule:
    return lower(_computations(name, num_ranks, num_microbatches, chunks, ahead))


@functools.lru_cache(maxsize=32)
def _computations(name: str, num_ranks: int, num_microbatches: int, chunks: int, ahead: int, /) -> Schedule:
    return make_schedule(name, num_ranks=num_ranks, num_microbatches=num_microbatches, chunks=chunks, ahead=ahead)


def num_chunks(mesh: MeshSection) -> int:
    """Stages of each pipeline rank."""
    return mesh.virtual_pipeline or default_chunks(mesh.schedule)


def pipeline_layout(config: RunConfig, shape: ModelShape, *, document_lengths: tuple[int, ...]) -> PipelineLayout:
    """The pipeline of a valid configuration; `document_lengths`: see `Plan`."""
    mesh, chunks = config.mesh, num_chunks(config.mesh)
    num_stages = mesh.pp * chunks
    ends = (
        embedding_layers(config, shape, document_lengths=document_lengths),
        head_layers(config, shape, document_lengths=document_lengths),
    )
    weights = (1.0,) * shape.num_layers
    if mesh.pp > 1:
        weights = block_weights(config, shape, document_lengths=document_lengths)
    stage_ranks = placement(mesh.schedule, mesh.pp, chunks=chunks)
    layers = mesh.layers_per_stage
    if not layers and mesh.stage_balance == "flops":
        layers = balanced_layers(weights, stage_ranks, ends=ends)
    layers = layers or equal_layers(shape.num_layers, num_stages)
    return PipelineLayout(
        schedule=mesh.schedule,
        chunks=chunks,
        stage_ranks=stage_ranks,
        layers_per_stage=layers,
        stage_costs=tuple(_costs(layers, weights, ends)),
        ahead=int(config.kernels.overlap_passes == "on"),
    )


def head_layers(config: RunConfig, shape: ModelShape, *, document_lengths: tuple[int, ...]) -> float:
    """The operations after the last layer, as a number of layers."""
    none, all_of_them = (
        flops_per_token(family_of(config), _of_layers(shape, n), document_lengths=document_lengths)
        for n in (0, shape.num_layers)
    )
    return none / (all_of_them - none) * shape.num_layers


def embedding_layers(config: RunConfig, shape: ModelShape, *, document_lengths: tuple[int, ...]) -> float:
    """The time of the embedding's lookup and of its gradient, as a number of layers.

    As on an H100, whatever the machine: every rank and every plan of a run must divide the layers in the same way.
    """
    tokens, cost = config.train.sequence_length, family_of(config).stage_cost
    none, all_of_them = (
        cost(
            _of_layers(shape, n),
            Place(),
            tokens=tokens,
            document_lengths=document_lengths,
            element=2,
            recompute=RecomputeSection(),
        )
        for n in (0, shape.num_layers)
    )
    layers = all_of_them.product_flops + all_of_them.attention_flops - none.product_flops - none.attention_flops
    layers += (all_of_them.moved_bytes - none.moved_bytes) * OPERATIONS_PER_BYTE
    return tokens * shape.hidden_size * LOOKUP_BYTES * OPERATIONS_PER_BYTE / layers * shape.num_layers


def block_weights(config: RunConfig, shape: ModelShape, *, document_lengths: tuple[int, ...]) -> tuple[float, ...]:
    """The work of each block, in layers: 1 on average; by its kind, as on an H100 like that of the embedding."""
    family, count = family_of(config), shape.num_layers
    of_block = family.kinds(shape)
    if len(numbers := {kind: of_block.index(kind) for kind in of_block}) < 2:
        return (1.0,) * count
    of_kind = {}
    for kind, number in numbers.items():
        # A stage with this block alone, which is neither the first nor the last.
        place = Place(stage=number + 1, num_stages=count + 2, layers_per_stage=(0, *(1,) * count, 0))
        cost = family.stage_cost(
            shape,
            place,
            tokens=config.train.sequence_length,
            document_lengths=document_lengths,
            element=2,
            recompute=RecomputeSection(),
        )
        of_kind[kind] = cost.product_flops + cost.attention_flops + cost.moved_bytes * OPERATIONS_PER_BYTE
    mean = sum(of_kind[kind] for kind in of_block) / count
    return tuple(of_kind[kind] / mean for kind in of_block)


def balanced_layers(
    weights: Sequence[float], stage_ranks: Sequence[int], *, ends: tuple[float, float]
) -> tuple[int, ...]:
    """Blocks of each stage, at least one, so that the rank with the most work has as little as possible.

    Each block goes to the rank with the least work, there to its shortest stage; among equals to one in the middle. If
    blocks differ, borders between stages are then moved as long as that helps.

    Args:
        weights: work of each block, in layers. stage_ranks: pipeline rank of each stage.
        ends: work of the embedding, in the first stage, and of the head, in the last one, in layers.
    """
    layers, middle = [1] * len(stage_ranks), (len(stage_ranks) - 1) / 2
    alike = (1.0,) * len(weights)
    costs = _costs(layers, alike, ends)
    of_rank = _of_ranks(costs, stage_ranks)
    for _ in range(len(weights) - len(layers)):
        keys = ((of_rank[rank], costs[s], abs(s - middle), s) for s, rank in enumerate(stage_ranks))
        stage = min(keys)[-1]
        layers[stage] += 1
        costs[stage] += 1
        of_rank[stage_ranks[stage]] += 1
    return tuple(layers) if tuple(weights) == alike else _moved(layers, weights, stage_ranks, ends=ends)


def _moved(
    layers: Sequence[int], weights: Sequence[float], stage_ranks: Sequence[int], *, ends: tuple[float, float]
) -> tuple[int, ...]:
    """The stages after moving one block at a time over a border, while the busiest ranks have less to do by it."""

    def work(layers: Sequence[int]) -> list[float]:
        return sorted(_of_ranks(_costs(layers, weights, ends), stage_ranks), reverse=True)

    best = tuple(layers)
    while True:
        borders = [(s, s + step) for s in range(len(best)) for step in (-1, 1) if 0 <= s + step < len(best)]
        moved = [tuple(n - (s == a) + (s == b) for s, n in enumerate(best)) for a, b in borders if best[a] > 1]
        better = min(moved, key=work, default=best)
        if work(better) >= work(best):
            return best
        best = better


def _costs(layers: Sequence[int], weights: Sequence[float], ends: tuple[float, float]) -> list[float]:
    """The work of each stage, in layers."""
    starts = itertools.accumulate(layers, initial=0)
    costs = [math.fsum(weights[start : start + count]) for start, count in zip(starts, layers, strict=False)]
    costs[0] += ends[0]
    costs[-1] += ends[1]
    return costs


def _of_ranks(costs: Sequence[float], stage_ranks: Sequence[int]) -> list[float]:
    of_rank = [0.0] * (max(stage_ranks) + 1)
    for rank, cost in zip(stage_ranks, costs, strict=True):
        of_rank[rank] += cost
    return of_rank


def _of_layers(shape: ModelShape, count: int) -> ModelShape:
    return dataclasses.replace(shape, num_layers=count)  # type: ignore[type-var]


# A list of layouts makes hundreds of plans of one model, and its table takes longer than all the rest of a plan.
@functools.lru_cache(maxsize=1024)
def rank_parameters(family: Family, shape: ModelShape, *, places: tuple[Place, ...]) -> tuple[ParamSpec, ...]:
    """The parameters of all stages of a rank; those that two stages share (a tied embedding) once."""
    return _of_stages([family.parameters(shape, place) for place in places])


@functools.lru_cache(maxsize=1024)
def rank_buffers(family: Family, shape: ModelShape, *, places: tuple[Place, ...]) -> tuple[ParamSpec, ...]:
    """The same of buffers, which are no parameters."""
    return _of_stages([family.buffers(shape, place) for place in places])


def _of_stages(tables: Sequence[Sequence[ParamSpec]]) -> tuple[ParamSpec, ...]:
    specs = {spec.name: spec for table in reversed(tables) for spec in table}
    return tuple({spec.name: specs[spec.name] for table in tables for spec in table}.values())


class ParameterCounts(NamedTuple):
    """Elements of the logical model: all, those that compute a token, and those that are not frozen."""

    total: int
    active: int
    trained: int


@functools.lru_cache(maxsize=64)
def count_parameters(family: Family, shape: ModelShape) -> ParameterCounts:
    """The counts of a model, without padding."""
    table = family.parameters(shape, Place())
    total, trained = num_elements(table), num_elements(spec for spec in table if not spec.frozen)
    return ParameterCounts(total, total if family.active is None else family.active(shape), trained)


@functools.lru_cache(maxsize=64)
def flops_per_token(family: Family, shape: ModelShape, *, document_lengths: tuple[int, ...]) -> int:
    """Operations of forward and backward for a token, as the family counts them; `document_lengths`: see `Plan`."""
    return family.flops_per_token(shape, document_lengths)
