"""What a family may have that GPT does not: named losses, buffers that are state, tensors with three dims (toy.py).

In every layout of the fp64 matrix against one rank; a few of them outside of soak.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.trainer.engines import (
    assemble,
    check_same_gradients,
    held_state,
    layouts,
    logical,
    microbatches,
    reduced,
    save_engine,
    small_config,
)
from tests.trainer.models.toy import EXPERTS, FACTOR, FAMILY, RATE, registered
from trainer.checkpoint.folder import read_index, run_state
from trainer.checkpoint.format import RunState
from trainer.config.parse import dump_config
from trainer.config.sections import MeshSection, OptimizerSection, RecomputeSection
from trainer.optim.layout import make_layout
from trainer.parallel.buckets import cut_buckets
from trainer.parallel.collectives import all_reduce_
from trainer.parallel.params import Place
from trainer.plan.memory import kept_bytes, model_buffer_bytes, rank_bytes, tables
from trainer.plan.plan import make_plan
from trainer.tasks.loaded_model import load_model

SOAK = pytest.mark.soak
LAYOUTS = [
    (4, {"tp": 2, "pp": 2, "sequence_parallel": True}, "state"),
    (2, {"cp": 2}, "parameters"),
    pytest.param(2, {}, "state", marks=SOAK),
    pytest.param(2, {"tp": 2}, "state", marks=SOAK),
    pytest.param(2, {"tp": 2, "sequence_parallel": True}, "none", marks=SOAK),
    pytest.param(2, {"pp": 2, "schedule": "zb_h1"}, "state", marks=SOAK),
    pytest.param(2, {"pp": 2, "schedule": "zb_v"}, "gradients", marks=SOAK),
    pytest.param(2, {"pp": 2, "schedule": "interleaved"}, "state", marks=SOAK),
    pytest.param(4, {"tp": 2, "sequence_parallel": True}, "parameters", marks=SOAK),
    pytest.param(4, {"tp": 2, "cp": 2, "sequence_parallel": True}, "state", marks=SOAK),
    pytest.param(4, {"pp": 2}, "gradients", marks=SOAK),
    pytest.param(8, {"tp": 2, "cp": 2, "pp": 2, "sequence_parallel": True}, "state", marks=SOAK),
]


def _config(*, average="token", optimizer="adamw", sharding="state", recompute="none", **mesh):
    config = small_config("llama", optimizer=OptimizerSection(lr=1e-2, name=optimizer, sharding=sharding))
    model = replace(config.model, family="toy", num_layers=4)
    train = replace(config.train, loss_average=average)
    return replace(
        config, model=model, train=train, mesh=MeshSection(**mesh), recompute=RecomputeSection(mode=recompute)
    )


def _gradients(context, config):
    """Reduced gradients of one step, its named losses, and what three steps make of weights and buffers."""
    with registered():
        engine = layouts(context, config)
        own_means = config.train.loss_average == "megatron"
        totals = engine.add_gradients(microbatches(engine, 0), own_means=own_means)
        gradients = reduced(engine)
        for axis in ("data", "pp"):
            all_reduce_(totals, engine.world.groups[axis])
        engine.buffers.forget()
        reports = [engine.step(microbatches(engine, step), 1e-2).read() for step in range(3)]
        held = engine.model_buffers.holds
        weights = logical(engine.optimizer.owned, engine.optimizer.state["weight"])
        return {
            "gradients": gradients,
            "named": [report.named_losses for report in reports],
            "losses": [(report.loss, report.grad_norm) for report in reports],
            "weights": weights,
            "buffers": logical(held, engine.model_buffers.values),
            "totals": totals.tolist(),
        }


def _whole(config, ranks):
    results = run_ranks(_gradients, ranks, config)
    whole = {
        key: assemble([part for one in results for part in one[key]]) for key in ("gradients", "weights", "buffers")
    }
    return {**results[0], **whole}


@functools.cache
def _alone(**options):
    return _whole(_config(**options), 1)


def _check_same(got, expected):
    check_same_gradients(got["gradients"], expected["gradients"])
    np.testing.assert_allclose(got["losses"], expected["losses"], rtol=1e-9)
    for one, other in zip(got["named"], expected["named"], strict=True):
        assert one.keys() == other.keys() == {f"spread_{i}" for i in range(4)}
        np.testing.assert_allclose([*one.values()], [*other.values()], rtol=1e-9)
    for name, values in expected["weights"].items():
        np.testing.assert_allclose(got["weights"][name], values, rtol=1e-7, atol=1e-9, err_msg=name)
    for name, values in expected["buffers"].items():
        np.testing.assert_array_equal(got["buffers"][name], values, err_msg=name)


def test_memory_counts_buffers():
    with registered():
        toy, gpt = _config(pp=2), replace(_config(pp=2), model=replace(_config().model, family="gpt"))
        plans = make_plan(toy, 2, facts=None), make_plan(gpt, 2, facts=None)
        assert [model_buffer_bytes(toy, plans[0], rank) for rank in range(2)] == [2 * EXPERTS * 4] * 2
        assert [model_buffer_bytes(gpt, plans[1], rank) for rank in range(2)] == [0, 0]
        held = [kept_bytes(toy, plans[0], table=table) for table in tables(toy, plans[0])]
        assert [rank.state for rank in rank_bytes(toy, plans[0])] == [one + 2 * EXPERTS * 4 for one in held]


@pytest.mark.parametrize("average", [pytest.param("token", marks=SOAK), "megatron"])
@pytest.mark.parametrize(("ranks", "mesh", "sharding"), LAYOUTS)
def test_a_layout_changes_nothing(ranks, mesh, sharding, average):
    _check_same(_whole(_config(average=average, sharding=sharding, **mesh), ranks), _alone(average=average))


@pytest.mark.parametrize(
    ("ranks", "mesh"), [(4, {"tp": 2, "sequence_parallel": True}), pytest.param(2, {"pp": 2}, marks=SOAK)]
)
def test_muon_takes_each_expert_for_a_matrix(ranks, mesh):
    expected = _alone(optimizer="muon")
    assert expected["weights"].keys() == _alone(average="token")["weights"].keys()
    _check_same(_whole(_config(optimizer="muon", **mesh), ranks), expected)


def test_recomputation_changes_nothing():
    _check_same(_whole(_config(recompute="full"), 1), _alone(average="token"))


def _objective(context, config, delta):
    """The step's objective by definition, and its gradient along a seeded direction; weights are moved along it."""
    with registered():
        engine = layouts(context, config)
        weight = engine.optimizer.state["weight"]
        direction = torch.randn(len(weight), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        weight += delta * direction
        engine.optimizer.publish()
        batches, own_means = microbatches(engine, 0), config.train.loss_average == "megatron"
        value, tokens = 0.0, 0.0
        for batch in batches:
            with torch.no_grad():
                totals = engine.executor.run(engine._evaluation(1), [batch]).tolist()
            loss, n, named = totals[0], totals[1], totals[2:-EXPERTS]
            named = sum(FACTOR * total / weight for total, weight in zip(named[::2], named[1::2], strict=True))
            value += loss / n + named if own_means else loss + n * named
            tokens += n
        engine.add_gradients(batches, own_means=own_means)
        engine.optimizer.reducer.finish()
        slope = sum(
            torch.dot(
                engine.buffers.gradients.view(slot.start, slot.start + slot.spec.numel),
                direction[slot.start : slot.start + slot.spec.numel],
            )
            for slot in engine.layout.slots
        )
        divisor = len(batches) if own_means else tokens
        return value / divisor, float(slope) / divisor


@pytest.mark.parametrize("average", ["token", "megatron"])
def test_the_gradient_is_that_of_the_objective(average):
    config, small = _config(average=average), 1e-5
    (low, _), (_, slope), (high, _) = (run_ranks(_objective, 1, config, delta)[0] for delta in (-small, 0.0, small))
    assert (high - low) / (2 * small) == pytest.approx(slope, rel=1e-6)


def _steps(context, config, root):
    """Buffers after an applied and a skipped step; then a checkpoint."""
    with registered():
        engine = layouts(context, config)
        first = engine.model_buffers.values.clone()
        applied = engine.step(microbatches(engine, 0), 1e-2).read().applied
        second = engine.model_buffers.values.clone()
        empty = [replace(batch, loss_mask_BS=batch.loss_mask_BS * 0) for batch in microbatches(engine, 1)]
        skipped = not engine.step(empty, 1e-2).read().applied
        third = engine.model_buffers.values.clone()
        run = RunState(step=1, consumed_samples=4, data_id="", data={}, optimizer_steps=1, config=dump_config(config))
        folder = save_engine(engine, root, run=run)
        return (applied, skipped), (first, second, third), folder, held_state(engine)


def _loaded(context, config, folder):
    with registered():
        engine = layouts(context, config)
        engine.load(str(folder))
        model = None
        if context.world == 1:
            model = load_model(folder, config, plan=engine.plan, world=engine.world).blocks["3"].mlp.bias.clone()
        return logical(engine.model_buffers.holds, engine.model_buffers.values), model


def test_buffers_change_with_applied_steps_alone_and_are_in_checkpoints(tmp_path):
    results = run_ranks(_steps, 4, _config(tp=2, sequence_parallel=True), tmp_path)
    for (applied, skipped), (first, second, third), _, _ in results:
        assert applied and skipped
        assert not torch.equal(first, second) and torch.equal(second, third)
    folder = results[0][2]
    index = read_index(folder)
    names = {name: tensor for name, tensor in index.tensors.items() if name.startswith("buffer/")}
    assert set(names) == {f"buffer/blocks.{i}.mlp.bias" for i in range(4)}
    assert all(tensor.dtype == "F32" and len(tensor.slices) == 1 for tensor in names.values())
    assert index.tensors["weight/blocks.0.mlp.gate"].shape == (EXPERTS, 64, 32)
    moved = results[0][1][1] - results[0][1][0]
    assert set(moved.abs().unique().tolist()) <= {0.0, RATE}
    for ranks, mesh in ((1, {}), (2, {"pp": 2})):
        loaded = run_ranks(_loaded, ranks, _config(**mesh), folder)
        whole = assemble([part for parts, _ in loaded for part in parts])
        for i in range(4):
            name = f"blocks.{i}.mlp.bias"
            np.testing.assert_array_equal(whole[name], results[0][1][1].numpy()[_place(name)])
        if ranks == 1:
            np.testing.assert_array_equal(loaded[0][1].numpy(), whole["blocks.3.mlp.bias"])
    assert run_state(folder).step == 1


def _place(name):
    config = _config()
    with registered():
        shape = FAMILY.shape(config, 250)
    layout = make_layout(FAMILY.buffers(shape, Place()), {"data": 1, "edp": 1})
    return next(slice(s.start, s.start + s.spec.numel) for s in layout.slots if s.spec.name == name)


def test_pieces_of_a_tensor_with_three_dims_are_the_whole_of_it():
    shape = FAMILY.shape(_config(), 250)
    for tp in (1, 2, 4):
        covered: dict[str, np.ndarray] = {}
        for rank in range(tp):
            for spec in FAMILY.parameters(shape, Place(tp_rank=rank, tp_size=tp)):
                for piece in spec.pieces:
                    if len(piece.shape) == 3:
                        box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.size, strict=True))
                        covered.setdefault(piece.name, np.zeros(piece.shape, int))[box] += 1
        assert len(covered) == 3 * 4 and all((counts == 1).all() for counts in covered.values())


def test_buckets_of_experts_and_of_the_rest_are_as_large_as_asked():
    """Their shard axes change in every block."""
    shape = FAMILY.shape(_config(), 250)
    table = [replace(spec, shard="edp") if len(spec.shape) == 3 else spec for spec in FAMILY.parameters(shape, Place())]
    size = max(spec.numel for spec in table) * 2
    buckets = list(cut_buckets(table, bucket_size=size))
    assert {spec.name for bucket in buckets for spec in bucket} == {spec.name for spec in table}
    for axis in ("data", "edp"):
        of_axis = [sum(spec.numel for spec in bucket) for bucket in buckets if bucket[0].shard == axis]
        assert all(len({spec.shard for spec in bucket}) == 1 for bucket in buckets)
        assert all(elements >= size for elements in of_axis[:-1])
    assert len(buckets) < 8
