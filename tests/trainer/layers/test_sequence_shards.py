"""What backward needs of the residual stream under sequence parallelism: this rank's tokens only, never all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.trainer.engines import SEQUENCE, microbatch, small_config
from trainer.config.sections import MeshSection
from trainer.parallel.mesh import mesh_of
from trainer.parallel.recorded import Record, recorded_world
from trainer.plan.plan import make_plan
from trainer.run.engine import Engine

TP = 4


def _saved(name: str, mode: str, *, sequence_parallel: bool) -> list[tuple[int, ...]]:
    """Shapes of what autograd keeps of a forward pass, but for parameters, in tensors without data."""
    config = small_config(name, dtype="bf16")
    mesh = MeshSection(tp=TP, sequence_parallel=sequence_parallel)
    # No parameter, and no width of a rank, has the shape of the stream.
    model = replace(config.model, num_kv_heads=4, ffn_hidden_size=96, max_position=2 * SEQUENCE)
    recompute = replace(config.recompute, mode=mode)
    config = replace(config, mesh=mesh, model=model, recompute=recompute)
    plan, mesh_ = make_plan(config, TP, facts=None), mesh_of(config, TP)
    world = recorded_world(mesh_, 0, record=Record(lambda _, value: [value] * TP))
    engine = Engine(config, plan, world=world, fresh=False)
    parameters = {tuple(parameter.shape) for parameter in engine.model.parameters()}
    found: list[tuple[int, ...]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tuple(tensor.shape))
        return tensor

    tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        engine.executor.stages[0]((), microbatch(tokens, tokens, torch.ones(1, SEQUENCE, device="meta")))
    return [shape for shape in found if shape not in parameters]


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_only_the_ranks_own_tokens_of_the_stream_are_kept(name, mode):
    whole, shard = (SEQUENCE, 32), (SEQUENCE // TP, 32)
    kept = _saved(name, mode, sequence_parallel=True)
    assert whole not in kept and kept.count(shard) >= 4
    complete = _saved(name, mode, sequence_parallel=False)
    assert shard not in complete and complete.count(whole) == kept.count(shard), "the same tensors, as shards"
