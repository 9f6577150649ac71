"""Layouts for the tests of checkpoints: all ranks of one in one process, each an engine that is joined to no other.

A layout is tp x pp x dp x optimizer.sharding, or one with context parallelism, several stages on a rank, or stages of
unequal length. What an engine should hold is painted from its parameters' pieces, without the code that cuts slices.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.trainer.engines import small_config
from trainer.checkpoint.format import RunState
from trainer.checkpoint.save import Target, commit, missing_parts, write_part
from trainer.config.sections import MeshSection, RunConfig
from trainer.parallel.collectives import Group
from trainer.parallel.mesh import AXES, mesh_of
from trainer.parallel.world import World
from trainer.plan.plan import make_plan
from trainer.run.engine import Engine

SIZES = ((1, 2, 4), (1, 2, 4), (1, 2), ("none", "state", "gradients", "parameters"))  # tp, pp, dp, sharding


class Layout(NamedTuple):
    """Axis sizes, optimizer.sharding, and further settings of [mesh]."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    sharding: str = "state"
    more: tuple[tuple[str, Any], ...] = ()

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.tp * self.pp * self.dp * dict(self.more).get("cp", 1)

    def __str__(self) -> str:
        more = "".join(f"-{key}={value}" for key, value in self.more)
        return f"tp{self.tp}-pp{self.pp}-dp{self.dp}-{self.sharding}{more}"


GRID = [Layout(*sizes) for sizes in itertools.product(*SIZES)]
SPECIAL = [
    Layout(2, 2, 1, "state", (("schedule", "interleaved"), ("virtual_pipeline", 2))),
    Layout(1, 2, 2, "parameters", (("schedule", "zb_v"),)),
    Layout(2, 1, 2, "state", (("cp", 2),)),
    Layout(1, 2, 1, "gradients", (("cp", 2), ("layers_per_stage", (1, 3)))),
    Layout(2, 2, 1, "none", (("layers_per_stage", (3, 1)), ("sequence_parallel", True))),
    Layout(1, 4, 2, "none", (("stage_balance", "flops"),)),
]


def config_of(layout: Layout) -> RunConfig:
    """Tied embeddings on both ends of the pipeline, a vocabulary to be padded, fewer key-value heads than ranks."""
    config = small_config("gpt2", dtype="fp32")
    sizes = {"num_layers": 4, "hidden_size": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2, "ffn_hidden_size": 8}
    return replace(
        config,
        model=replace(config.model, **sizes, vocab_size=250),
        mesh=MeshSection(tp=layout.tp, pp=layout.pp, **dict(layout.more)),
        train=replace(config.train, global_batch=8),
        optimizer=replace(config.optimizer, sharding=layout.sharding, bucket_size=300),
    )


def world_of(config: RunConfig, rank: int, world_size: int) -> World:
    """A rank that is joined to no other."""
    mesh = mesh_of(config, world_size)
    groups = {}
    for axis in AXES:
        ranks = mesh.ranks_of(axis, rank)
        groups[axis] = Group(axis, len(ranks), ranks.index(rank)) if ranks else Group.single(axis)
    place = {"rank": rank, "world_size": world_size, "local_rank": rank, "local_world_size": world_size}
    return World(**place, mesh=mesh, coordinates=mesh.coordinates(rank), device=torch.device("cpu"), groups=groups)


@functools.cache
def engines(layout: Layout) -> list[Engine]:
    """All ranks of a layout, each with the seeded state."""
    config, count = config_of(layout), layout.world_size
    plan = make_plan(config, count, facts=None)
    made = [Engine(config, plan, world=world_of(config, rank, count), fresh=False) for rank in range(count)]
    for engine in made:
        for name, values in engine.optimizer.state.items():
            paint(engine, name, values)
    return made


@functools.cache
def value(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The logical tensor, whole: seeded by its name, no two elements equal."""
    generator = torch.Generator().manual_seed(sum(ord(letter) * 31**place for place, letter in enumerate(key)) % 2**62)
    return torch.randperm(1 << 16, generator=generator)[: math.prod(shape)].view(shape) + 0.5


def paint(engine: Engine, name: str, values: torch.Tensor) -> None:
    """Write what a rank holds into a tensor of the state; padding 0."""
    buffer = torch.zeros(engine.layout.size)
    for slot in engine.layout.slots:
        for piece in slot.spec.pieces:
            box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
            part = value(f"{name}/{piece.name}", tuple(piece.shape))[box].reshape(-1)
            first = slot.start + piece.offset
            buffer[first : first + len(part)] = part
    holds = engine.optimizer.holds[name]
    for run, span in zip(holds.runs, holds.spans(), strict=True):
        values[span] = buffer[run.start : run.stop]


def save(root: Path, layout: Layout) -> Path:
    run = RunState(step=2, consumed_samples=2, data_id="", data={}, optimizer_steps=2, config="")
    target, ranks = Target(root, run, "x", {"tokenizer/vocab.json": b"{}"}), engines(layout)
    # In any order: rank 0 looks at files only.
    for rank in reversed(range(len(ranks))):
        assert missing_parts(target, len(ranks)) == list(range(rank + 1))
        write_part(target, rank, shard=ranks[rank].shard, state=ranks[rank].optimizer.state)
    commit(target, len(ranks))
    return target.root / target.name
