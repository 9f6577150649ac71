"""Rules between the layers of a model, the microbatches of a step and the pipeline.

Each problem is one line with the conflicting values and advice. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import suppress

from mdata import UsageError
from trainer.config.sections import MeshSection, RunConfig
from trainer.models.arithmetic import round_up
from trainer.pipeline.generators import default_chunks, impossible
from trainer.plan.lengths import batch_sizes, sizes_setting
from trainer.plan.stages import num_chunks


def pipeline_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every problem of the pipeline; those of its microbatches only if the ranks can be divided."""
    mesh = config.mesh
    if mesh.pp == 1:
        yield from _without_effect(mesh)
        return
    chunks, num_layers = num_chunks(mesh), config.model.num_layers
    wrong_chunks = impossible(mesh.schedule, num_ranks=mesh.pp, chunks=chunks, num_microbatches=mesh.pp)
    stages = mesh.pp * (default_chunks(mesh.schedule) if wrong_chunks else chunks)
    if stages > num_layers:
        yield _too_many_stages(config, world_size, chunks=stages // mesh.pp)
    yield from _layer_problems(config, stages)
    others = mesh.tp * mesh.cp
    part = world_size // (others * mesh.pp)
    if part and world_size % (others * mesh.pp) == 0:
        yield from _schedule_problems(config, chunks, config.train.micro_batch * part)
    elif wrong_chunks:
        yield f"mesh.schedule={mesh.schedule}: {wrong_chunks}; {_other_chunks(config, chunks)}"


def _too_many_stages(config: RunConfig, world_size: int, *, chunks: int) -> str:
    """A problem whose every remedy works: fewer ranks, one stage for each, or more layers."""
    mesh, num_layers = config.mesh, config.model.num_layers
    stages = f"mesh.pp={mesh.pp}" + (f" x {chunks} stages per rank = {mesh.pp * chunks}" if chunks > 1 else "")
    remedies, sizes = [], _batches(config)
    for pp in range(num_layers // chunks, 0, -1):
        fewer = dataclasses.replace(mesh, pp=pp)
        dp, rest = divmod(world_size, mesh.tp * mesh.cp * pp)
        if rest or (pp == 1 and list(_without_effect(fewer))):
            continue
        if all(_can_be_run(fewer, chunks, size=size, part=config.train.micro_batch * dp) for size in sizes):
            remedies.append(f"mesh.pp={pp}")
            break
    if chunks > 1 and mesh.pp <= num_layers:
        remedies.append('mesh.schedule="1f1b"' + (" with mesh.virtual_pipeline=0" if mesh.virtual_pipeline > 1 else ""))
    ways = ", ".join([*remedies, "or a deeper model"]) if remedies else "a deeper model"
    return f"{stages} stages are more than model.num_layers={num_layers}; choose {ways}"


def _can_be_run(mesh: MeshSection, chunks: int, *, size: int, part: int) -> bool:
    """Whether a batch of `size` samples divides into microbatches of `part` that the schedule takes."""
    count, rest = divmod(size, part)
    return not (rest or impossible(mesh.schedule, num_ranks=mesh.pp, chunks=chunks, num_microbatches=count))


def _batches(config: RunConfig) -> list[int]:
    """The sizes of batch that a run has."""
    sizes = {config.train.global_batch}
    with suppress(UsageError):  # an invalid ramp is reported separately
        sizes.update(batch_sizes(config).sizes)
    return sorted(sizes)


def _other_chunks(config: RunConfig, chunks: int) -> str:
    """The remedy for a number of stages per rank that a schedule does not have."""
    enough = chunks > 1 and config.mesh.pp * chunks <= config.model.num_layers
    return "set mesh.virtual_pipeline to 0" + (', or mesh.schedule="interleaved"' if enough else "")


def _without_effect(mesh: MeshSection) -> Iterator[str]:
    for key in ("schedule", "virtual_pipeline", "stage_balance", "layers_per_stage"):
        value = getattr(mesh, key)
        if value != MeshSection.__dataclass_fields__[key].default and (key, value) != ("virtual_pipeline", 1):
            shown = list(value) if isinstance(value, tuple) else value
            yield f"mesh.{key}={shown!r} applies only to mesh.pp above 1; set that, or leave mesh.{key} out"


def _layer_problems(config: RunConfig, stages: int) -> Iterator[str]:
    layers, num_layers = config.mesh.layers_per_stage, config.model.num_layers
    if not layers:
        return
    shown = f"mesh.layers_per_stage={list(layers)}"
    if config.mesh.stage_balance != "layers":
        yield f'{shown} and mesh.stage_balance="{config.mesh.stage_balance}" are both set; keep one of them'
    if len(layers) != stages:
        yield f"{shown} has {len(layers)} numbers for {stages} stages; give one for each"
    if min(layers) < 1:
        yield f"{shown} has a stage without layers; give each at least 1"
    if sum(layers) != num_layers:
        yield f"{shown} has {sum(layers)} layers in all, and model.num_layers={num_layers}; make them equal"


def _schedule_problems(config: RunConfig, chunks: int, part: int) -> Iterator[str]:
    """
    Args:
        part: samples that a microbatch has over all data-parallel ranks.
    """
    mesh, train = config.mesh, config.train
    for size in _batches(config):
        if size % part:
            continue  # reported with the other layouts
        count = size // part
        problem = impossible(mesh.schedule, num_ranks=mesh.pp, chunks=chunks, num_microbatches=count)
        if not problem:
            continue
        remedy = _other_chunks(config, chunks)
        if count % mesh.pp and mesh.schedule == "interleaved" and chunks > 1:
            whole = round_up(count, mesh.pp) * part
            what = (
                "train.global_batch"
                if size == train.global_batch
                else f"a step of {sizes_setting(config).partition('=')[0]}"
            )
            remedy = f'choose {what}={whole}, or mesh.schedule="1f1b"'
        yield f"mesh.schedule={mesh.schedule} with a batch of {size} samples: {problem}; {remedy}"
        return
