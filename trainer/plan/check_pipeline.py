"""Rules between the layers of a model, the microbatches of a step and the pipeline.

Each problem is one line with the conflicting values and advice. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from mdata import UsageError
from trainer.config.sections import MeshSection, RunConfig
from trainer.models.arithmetic import round_up
from trainer.pipeline.generators import impossible
from trainer.plan.lengths import batch_sizes
from trainer.plan.stages import num_chunks

OTHER_CHUNKS = 'set mesh.virtual_pipeline to 0, or mesh.schedule="interleaved"'


def pipeline_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Every problem of the pipeline; those of its microbatches only if the ranks can be divided."""
    mesh = config.mesh
    if mesh.pp == 1:
        yield from _without_effect(mesh)
        return
    chunks, num_layers = num_chunks(mesh), config.model.num_layers
    stages = mesh.pp * chunks
    stages_text = f"mesh.pp={mesh.pp}" + (f" x {chunks} stages per rank = {stages} stages" if chunks > 1 else " stages")
    if stages > num_layers:
        fit = [pp for pp in range(1, num_layers // chunks + 1) if world_size % (mesh.tp * mesh.cp * pp) == 0]
        nearest = f"choose mesh.pp={max(fit)}" if fit else "choose fewer stages per rank"
        yield f"{stages_text} are more than model.num_layers={num_layers}; {nearest}, or a deeper model"
    yield from _layer_problems(config, stages)
    others = mesh.tp * mesh.cp
    part = world_size // (others * mesh.pp)
    if part and world_size % (others * mesh.pp) == 0:
        yield from _schedule_problems(config, chunks, config.train.micro_batch * part)
    elif problem := impossible(mesh.schedule, num_ranks=mesh.pp, chunks=chunks, num_microbatches=mesh.pp):
        yield f"mesh.schedule={mesh.schedule}: {problem}; {OTHER_CHUNKS}"


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
    sizes = [train.global_batch]
    with suppress(UsageError):  # an invalid ramp is reported separately
        sizes = sorted({*sizes, *batch_sizes(config).sizes})
    for size in sizes:
        if size % part:
            continue  # reported with the other layouts
        count = size // part
        problem = impossible(mesh.schedule, num_ranks=mesh.pp, chunks=chunks, num_microbatches=count)
        if not problem:
            continue
        remedy = OTHER_CHUNKS
        if count % mesh.pp and mesh.schedule == "interleaved" and chunks > 1:
            whole = round_up(count, mesh.pp) * part
            what = "train.global_batch" if size == train.global_batch else "a step of train.batch_ramp"
            remedy = f'choose {what}={whole}, or mesh.schedule="1f1b"'
        yield f"mesh.schedule={mesh.schedule} with a batch of {size} samples: {problem}; {remedy}"
        return
