"""Muon against torch's own, its plan of exchanges on every mesh, and its updates on any layout against one rank."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from tests.helpers.ranks import run_ranks
from tests.trainer.engines import assemble, held_state, layouts, logical, microbatches, small_config
from tests.trainer.shapes import SHAPES
from trainer.config.sections import MeshSection, MoESection, OptimizerSection
from trainer.kernels.table import PLAIN
from trainer.models.gpt.params import parameter_table
from trainer.optim.layout import make_layout
from trainer.optim.muon import COEFFICIENTS, MatrixPart, exchanged, iterations, make_rounds, parts_of, update_scale
from trainer.optim.ownership import owned_by
from trainer.parallel.collectives import Group, gather_objects
from trainer.parallel.mesh import Mesh
from trainer.parallel.params import Place
from trainer.run.engine import Engine

SIMPLE, FIVE = COEFFICIENTS["simple"] * 5, COEFFICIENTS["quintic"]
MUON = OptimizerSection(lr=1e-2, name="muon")


def exactly_orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """U V^T of the singular value decomposition: what Newton-Schulz comes near to."""
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vt


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 40), (1, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("coefficients", [SIMPLE, FIVE], ids=["simple", "quintic"])
def test_it_keeps_the_singular_vectors_and_makes_the_values_alike(shape, dtype, coefficients):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = PLAIN.orthogonalize(matrix, dtype, coefficients)
    assert found.shape == matrix.shape and found.dtype == matrix.dtype
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5 and values.max() < 1.3
    exact = exactly_orthogonal(matrix)
    assert (found * exact).sum() / (found.norm() * exact.norm()) > 0.97
    assert torch.equal(PLAIN.orthogonalize(torch.zeros(shape), dtype, coefficients), torch.zeros(shape))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(
    ("section", "theirs"),
    [
        (MUON, {"adjust_lr_fn": "match_rms_adamw"}),
        (replace(MUON, muon_scale_mode="shape_scaling", muon_extra_scale_factor=1.0), {"adjust_lr_fn": "original"}),
    ],
)
def test_steps_are_those_of_torch(section, theirs, nesterov):
    """Its products are in bf16. A step that is not applied changes nothing."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn((20, 12), generator=generator)
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Muon([parameter], lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=nesterov, **theirs)
    weight, mean, rounded = start.clone().view(-1), torch.zeros(240), torch.zeros(240, dtype=torch.bfloat16)
    yes, rate, scale = torch.tensor(True), torch.tensor(0.02), update_scale(section, (20, 12))
    for _ in range(4):
        parameter.grad = torch.randn((20, 12), generator=generator)
        optimizer.step()
        for applied in (~yes, yes):
            gradient = (4 * parameter.grad if applied else torch.full((20, 12), torch.nan)).view(-1)
            direction = PLAIN.muon_momentum_(mean, gradient, torch.tensor(0.25), applied, (0.95, nesterov))
            update = scale * PLAIN.orthogonalize(direction.view(20, 12), torch.bfloat16, iterations(section)).view(-1)
            PLAIN.muon_apply_((weight, rounded), update, rate, applied, 0.1)
        # Two bf16 computations of values of up to 1.2 times the scale; their sums are ordered differently.
        torch.testing.assert_close(weight.view(20, 12), parameter.data, rtol=0, atol=4 * 0.02 * scale * 2**-5)
        assert torch.equal(rounded, weight.to(torch.bfloat16))
    assert (weight.view(20, 12) - start).abs().mean() > 10 * (weight.view(20, 12) - parameter.data).abs().mean()


def test_the_scales_are_those_of_the_papers():
    scale = functools.partial(update_scale, replace(MUON, muon_extra_scale_factor=2.0))
    assert scale((3, 12)) == 2 * 12**0.5
    for mode, tall, flat in (("shape_scaling", 2.0, 1.0), ("unit_rms_norm", 2.0, 0.5)):
        section = replace(MUON, muon_scale_mode=mode, muon_extra_scale_factor=1.0)
        assert (update_scale(section, (12, 3)), update_scale(section, (3, 12))) == (tall, flat)
    assert iterations(replace(MUON, muon_coefficient_type="quintic", muon_ns_steps=10)) == FIVE * 2


@functools.cache
def _whole() -> dict[str, torch.Tensor]:
    """A value for every element of every matrix of the small models."""
    generator, found = torch.Generator().manual_seed(3), {}
    for name, shape in SHAPES.items():
        for spec in parameter_table(shape, Place()):
            for piece in spec.pieces if spec.matrix else ():
                drawn = torch.randn(piece.shape, generator=generator, dtype=torch.float64)
                found[f"{name}/{piece.name}"] = drawn
    return found


@given(st.sampled_from(list(SHAPES)), st.sampled_from([1, 2, 4]), st.integers(1, 7), st.data())
@examples(30)
def test_each_matrix_is_put_together_by_one_rank_of_any_mesh_and_every_copy_gets_its_part(name, tp, data, drawn):
    """Without communication: what a rank expects of another is what that one sends, in the same order."""
    shape = SHAPES[name]
    mesh = Mesh(tp * data, tp, kv=max(1, tp // shape.num_kv_heads))
    parts = []
    for rank in range(mesh.world_size):
        place = Place(tp_rank=mesh.index("tp", rank), tp_size=tp)
        layout = make_layout(parameter_table(shape, place), {"data": data, "edp": 1})
        owned = owned_by(layout, {axis: mesh.index(axis, rank) for axis in ("data", "edp")})
        parts.append(parts_of(owned.only(matrix=True), lambda axis, rank=rank: mesh.index(axis, rank)))
    expected = {piece.name for spec in parameter_table(shape, Place()) if spec.matrix for piece in spec.pieces}
    views = [make_rounds(parts, rank) for rank in range(mesh.world_size)]
    made = []
    for rounds in zip(*views, strict=True):
        for sender, receiver in itertools.product(range(mesh.world_size), repeat=2):
            assert rounds[sender].mine[receiver] == rounds[receiver].theirs[sender]
        for one in rounds:
            asked = [part for some in one.theirs for part in some]
            if not asked:
                continue
            (matrix,) = {(part.name, part.shape) for part in asked}
            made.append(matrix[0])
            count = np.zeros(matrix[1], dtype=int)
            for part in asked:
                part.of(count)[...] += part.counts
            assert (count == 1).all()
    assert sorted(made) == sorted(expected)
    for rank, of_rank in enumerate(parts):
        assert sorted(p for one in views[rank] for some in one.mine for p in some) == sorted(of_rank)


def test_the_embedding_the_head_norms_and_biases_are_left_to_adamw():
    specs = [spec for name in SHAPES for spec in parameter_table(SHAPES[name], Place())]
    for spec in specs:
        assert spec.matrix == (spec.name.startswith("blocks.") and len(spec.shape) == 2), spec.name


def _weights_after(context, config, num_steps):
    engine = layouts(context, config)
    assert any(one.mine for one in engine.optimizer._matrices.rounds)
    for step in range(num_steps):
        engine.step(microbatches(engine, step), 1e-2)
    optimizer = engine.optimizer
    return [(n, logical(optimizer.owns[n], optimizer.state[n])) for n in optimizer.state]


def _assembled(results):
    return {
        name: assemble([part for result in results for n, parts in result if n == name for part in parts])
        for name in dict(results[0])
    }


@pytest.mark.parametrize(
    ("name", "ranks", "tp", "sequence_parallel"),
    [("gpt2", 2, 1, False), ("wide", 4, 2, True), ("llama", 4, 4, False), ("llama", 4, 1, False)],
)
@pytest.mark.parametrize(("dtype", "bound"), [("fp64", 1e-8), pytest.param("fp32", 2e-5, marks=pytest.mark.soak)])
def test_updates_on_any_layout_equal_those_of_one_rank(name, ranks, tp, sequence_parallel, dtype, bound):
    """Three steps; at tp 4 two ranks hold copies of a key-value head."""
    config = small_config(name, dtype=dtype, optimizer=MUON)
    expected = _assembled(run_ranks(_weights_after, 1, config, 3))
    layout = replace(config, mesh=MeshSection(tp=tp, sequence_parallel=sequence_parallel))
    found = _assembled(run_ranks(_weights_after, ranks, layout, 3))
    assert {name: set(values) for name, values in found.items()} == {n: set(v) for n, v in expected.items()}
    assert "blocks.0.attention.q.weight" in found["momentum_buffer"]
    assert "embedding.weight" in found["exp_avg_sq"] and "final_norm.weight" in found["exp_avg"]
    for kind, values in expected.items():
        for tensor, reference in values.items():
            if dtype == "fp32" and tensor.endswith("attention.k.bias"):
                continue  # its gradient is zero but for rounding, which AdamW makes as large as any other
            np.testing.assert_allclose(found[kind][tensor], reference, rtol=0, atol=bound, err_msg=f"{kind}/{tensor}")


@pytest.mark.parametrize("sharding", ["none", pytest.param("state", marks=pytest.mark.soak)])
def test_experts_of_every_rank_are_updated(sharding):
    """Data-parallel ranks that share experts hold no copies of them, even where they do of all other weights."""
    config = small_config("llama", optimizer=replace(MUON, sharding=sharding))
    config = replace(config, model=replace(config.model, moe=MoESection(num_experts=4, ffn_hidden_size=16)))
    expected = _assembled(run_ranks(_weights_after, 1, config, 3))["weight"]
    found = _assembled(run_ranks(_weights_after, 4, replace(config, mesh=MeshSection(ep=2)), 3))["weight"]
    for name, reference in expected.items():
        np.testing.assert_allclose(found[name], reference, rtol=0, atol=1e-8, err_msg=name)


def _one_exchange(context, tp):
    world = context.join(Mesh(context.world, tp))
    place = Place(tp_rank=world.groups["tp"].rank, tp_size=tp)
    layout = make_layout(parameter_table(SHAPES["llama"], place), {"data": world.mesh.size("data"), "edp": 1})
    owned = owned_by(layout, {axis: world.groups[axis].rank for axis in ("data", "edp")}).only(matrix=True)
    index = {axis: group.rank for axis, group in world.groups.items()}.__getitem__
    parts = gather_objects(parts_of(owned, index), world.groups["stage"])
    out = []
    for one in make_rounds(parts, world.rank):
        values = {part: part.of(_whole()[f"llama/{part.name}"]).flatten() for some in one.mine for part in some}
        like = torch.zeros(0, dtype=torch.float64)
        update = functools.partial(PLAIN.orthogonalize, dtype=torch.float64, coefficients=SIMPLE)
        for part, found in exchanged(one, values.__getitem__, update=update, like=like, group=world.groups["stage"]):
            out.append((part.name, (part.shape, part.start), found.view(part.size).numpy()))
    return out


@pytest.mark.parametrize(("ranks", "tp"), [(1, 1), (2, 1), (4, 2)])
def test_an_orthogonal_matrix_has_the_same_bits_on_every_layout(ranks, tp):
    found = assemble([part for parts in run_ranks(_one_exchange, ranks, tp) for part in parts])
    assert len(found) == 14
    for name, values in found.items():
        expected = PLAIN.orthogonalize(_whole()[f"llama/{name}"], torch.float64, SIMPLE)
        np.testing.assert_array_equal(values, expected.numpy(), err_msg=name)


def _skipped(context, config):
    engine: Engine = layouts(context, config)
    engine.step(microbatches(engine, 0), 1e-2)
    before = held_state(engine)
    reducer = engine.optimizer.reducer
    finish = reducer.finish

    def poisoned():
        finish()
        if context.rank == 0:
            split = next(slot for slot in engine.layout.slots if slot.spec.matrix)
            engine.buffers.gradients.values[split.start] = float("inf")

    reducer.finish = poisoned
    report = engine.step(microbatches(engine, 1), 1e-2).read()
    reducer.finish = finish
    same = all(torch.equal(before[name], x) for name, x in held_state(engine).items())
    return report.applied, same, engine.step(microbatches(engine, 2), 1e-2).read().applied


def test_a_step_that_overflows_on_one_rank_changes_nothing_on_any():
    config = small_config("llama", optimizer=MUON)
    assert run_ranks(_skipped, 2, config) == [(False, True, True)] * 2


def _bf16_run(context):
    engine = layouts(context, small_config("llama", dtype="bf16", optimizer=replace(MUON, lr=0.02)))
    batch = microbatches(engine, 0)
    return [engine.step(batch, 2e-2).read().loss for _ in range(12)]


def test_a_model_in_bf16_learns_by_it():
    losses, others = run_ranks(_bf16_run, 2)
    assert losses == others and losses[-1] < 0.8 * losses[0]


def test_a_part_knows_its_place_in_the_whole():
    part = MatrixPart("m", (4, 6), (1, 2), (2, 3), True, 0)
    whole = torch.arange(24).view(4, 6)
    assert part.of(whole).tolist() == [[8, 9, 10], [14, 15, 16]] and part.numel == 6
    assert Group.single("stage").size == 1
