"""A small engine on the ranks of a test, and its tensors assembled by logical name."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.helpers.ranks import run_ranks
from tests.trainer.shapes import SHAPES
from trainer.checkpoint.format import RunState
from trainer.checkpoint.save import Target, save_checkpoint
from trainer.config.sections import (
    DataSection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from trainer.models.stage import Microbatch
from trainer.optim.ownership import Ownership
from trainer.parallel.collectives import all_reduce_
from trainer.parallel.init import normal
from trainer.parallel.mesh import mesh_of
from trainer.plan.plan import make_plan
from trainer.run.engine import Engine

SEQUENCE, GLOBAL_BATCH = 16, 4


def small_config(name: str, *, dtype: str = "fp64", **sections: Any) -> RunConfig:
    """A run of the shapes in shapes.py; sections replace those of the same name."""
    shape = SHAPES[name]
    model = ModelSection(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        ffn_hidden_size=shape.ffn_hidden_size,
        vocab_size=shape.vocab_size,
        position=shape.position,
        norm=shape.norm,
        activation=shape.activation,
        bias=shape.bias,
        tie_embeddings=shape.tie_embeddings,
        init_std=shape.init_std,
    )
    given = {
        "run": RunSection(folder="unused", seed=5),
        "model": model,
        "data": DataSection(blend="unused"),
        "train": TrainSection(sequence_length=SEQUENCE, global_batch=GLOBAL_BATCH, micro_batch=1, steps=20),
        "optimizer": OptimizerSection(lr=1e-2),
        "precision": PrecisionSection(dtype=dtype),
    }
    return RunConfig(**(given | sections))


def layouts(context: Any, config: RunConfig, **engine: Any) -> Engine:
    """The engine of this rank, over all ranks of the test."""
    world = context.join(mesh_of(config, context.world))
    return Engine(config, make_plan(config, context.world, facts=None), world=world, **engine)


def microbatches(engine: Engine, step: int) -> list[Microbatch]:
    """This rank's part of a seeded global batch; some tokens carry no loss."""
    generator = np.random.default_rng(step)
    batch = engine.plan.global_batch
    shape = (batch, SEQUENCE)
    tokens, labels = (generator.integers(0, 250, shape) for _ in range(2))
    mask = (generator.random(shape) < 0.9).astype(np.float32)
    plan, dp = engine.plan, engine.dp
    rows = np.arange(batch).reshape(plan.num_microbatches, dp.size, plan.micro_batch)[:, dp.rank]
    device = engine.world.device
    out = []
    for r in rows:
        parts = (torch.from_numpy(x[r]).to(device) for x in (tokens, labels, mask))
        samples_B = torch.from_numpy(r + step * batch).to(device)
        out.append(replace(microbatch(*parts), samples_B=samples_B).on_context_rank(engine.cp))
    return out


def microbatch(tokens_BS: torch.Tensor, labels_BS: torch.Tensor, loss_mask_BS: torch.Tensor) -> Microbatch:
    """A microbatch of whole rows, without optional fields."""
    return Microbatch(tokens_BS=tokens_BS, labels_BS=labels_BS, loss_mask_BS=loss_mask_BS)


def with_documents(batches: Sequence[Microbatch]) -> list[Microbatch]:
    """Documents that end inside chunks of context parallelism and on their borders; positions restart in each."""
    whole = torch.tensor([0, 3, 8, 13, SEQUENCE], dtype=torch.int32)
    positions = torch.arange(SEQUENCE) - torch.repeat_interleave(whole[:-1], whole.diff())
    out = []
    for batch in batches:
        rows = batch.tokens_BS.shape[0]
        ends = [whole[:-1] + SEQUENCE * row for row in range(rows)] + [torch.tensor([SEQUENCE * rows])]
        columns = torch.arange(SEQUENCE) if batch.columns_S is None else batch.columns_S
        places = positions[columns].expand(rows, -1).contiguous()
        out.append(replace(batch, bounds=torch.cat(ends).int(), longest=5, positions_BS=places))
    return out


def kept_bytes(context: Any, config: RunConfig) -> int:
    """Bytes that are held behind the blocks' forward pass and were not before it."""
    engine = layouts(context, config)
    batch = microbatches(engine, 0)[0]
    x_ND = engine.model._enter(batch, None)
    gc.collect()  # an engine of an earlier test, which would be freed meanwhile
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = engine.model._through_blocks((x_ND,), batch)
    assert out[0].requires_grad
    return sum(event.self_cpu_memory_usage for event in profile.events())


def logical(owned: Ownership, state: torch.Tensor) -> list[tuple[str, Any, np.ndarray]]:
    """A tensor of a rank's optimizer state as (logical name, whole shape and start, values)."""
    out = []
    for _, part, first in owned.slices():
        count = int(np.prod(part.size))
        values = state[first : first + count].view(part.size).cpu().numpy()
        out.append((part.name, (part.shape, part.start), values.copy()))
    return out


def reduced(engine: Engine, divisor: Any = 1) -> list[tuple[str, Any, np.ndarray]]:
    """The rank's part of the gradients after reduction, divided by a divisor."""
    engine.optimizer.reducer.finish()
    engine.optimizer.reducer.sum_copies()
    runs = engine.buffers.owned.runs
    flat = torch.cat([engine.buffers.gradients.view(run.start, run.stop) for run in runs])
    return logical(engine.buffers.owned, flat / divisor)


def step_gradients(context: Any, config: RunConfig, documents: bool = False) -> Any:
    """(loss and tokens, evaluation, gradients of one step as the optimizer sees them) on this rank."""
    engine = layouts(context, config)
    batches = microbatches(engine, 0)
    if documents:
        batches = with_documents(batches)
    evaluated = engine.evaluate(batches)
    totals = engine.add_gradients(batches)
    for axis in ("pp", "data"):
        all_reduce_(totals, engine.world.groups[axis])
    return totals.tolist(), evaluated, reduced(engine, totals[1])


def whole_gradients(config: RunConfig, ranks: int, documents: bool = False) -> Any:
    """The same of all ranks together, which agree on loss, tokens and evaluation."""
    results = run_ranks(step_gradients, ranks, config, documents)
    (totals,) = {tuple(totals) for totals, *_ in results}
    (evaluated,) = {found for _, found, _ in results}
    return totals, evaluated, assemble([part for *_, parts in results for part in parts])


def assemble(parts: list[tuple[str, Any, np.ndarray]]) -> dict[str, np.ndarray]:
    """Whole logical tensors from all ranks' parts; copies must be equal."""
    whole: dict[str, np.ndarray] = {}
    for name, (shape, start), values in parts:
        target = whole.setdefault(name, np.full(shape, np.nan))
        box = tuple(slice(a, a + n) for a, n in zip(start, values.shape, strict=True))
        old = target[box]
        np.testing.assert_allclose(np.where(np.isnan(old), values, old), values, rtol=1e-12, atol=1e-15, err_msg=name)
        target[box] = values
    assert not any(np.isnan(x).any() for x in whole.values()), "a part of a tensor is held by nobody"
    return whole


def on_device(batch: Microbatch, device: torch.device) -> Microbatch:
    """The microbatch with all its tensors on a device."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    moved = {name: x.to(device) for name, x in fields.items() if isinstance(x, torch.Tensor)}
    if (real := batch.real) is not None:
        moved["real"] = real._replace(flat_M=real.flat_M.to(device), bounds=real.bounds.to(device))
    return replace(batch, **moved)


def check_same_gradients(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """The numerics policy for fp64 gradients of two layouts (CONTRIBUTING.md)."""
    assert got.keys() == expected.keys()
    largest = max(np.abs(g).max() for g in expected.values())
    for key, reference in expected.items():
        bound = 1e-10 * max(np.abs(reference).max(), 1e-3 * largest)
        assert np.abs(got[key] - reference).max() <= bound, key


def held_state(engine: Engine) -> dict[str, torch.Tensor]:
    """A copy of what the rank updates, without what it gathers from others."""
    engine.optimizer.gathers.release()
    state, holds = engine.optimizer.state, engine.optimizer.holds
    return {
        name: torch.cat([values[:0], *(values[span] for span in holds[name].spans())]) for name, values in state.items()
    }


def save_engine(engine: Engine, root: Path, *, run: RunState) -> Path:
    """Write a checkpoint and wait for it; called by every rank."""
    target = Target(root, engine.with_scale(run), "test")
    return save_checkpoint(target, engine.shard, state=engine.state, world=engine.everyone)


def draw_adapters(engine: Engine) -> None:
    """Draw all adapters; the second of their two matrices begins as 0, with which half of the gradients are 0."""
    engine.optimizer.gathers.release()
    held, weight = engine.optimizer.holds["weight"], engine.optimizer.state["weight"]
    for _, part, first in held.slices():
        count = int(np.prod(part.size))
        if part.name.endswith("lora_b"):
            whole = normal(7, part.name, first=0, count=int(np.prod(part.shape))).view(part.shape) * 0.1
            box = tuple(slice(a, a + n) for a, n in zip(part.start, part.size, strict=True))
            weight[first : first + count] = whole[box].flatten()
    engine.optimizer.publish()
