"""Experts: what the router chooses, what its losses are, and every layout against one rank in fp64."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.pairwise import pairwise
from tests.helpers.ranks import run_ranks
from tests.trainer.engines import (
    assemble,
    check_same_gradients,
    draw_adapters,
    kept_bytes,
    layouts,
    logical,
    microbatches,
    reduced,
    save_engine,
    small_config,
    with_documents,
)
from tests.trainer.optim.test_sharding import _same_bits, _train
from trainer.checkpoint.format import RunState
from trainer.config.parse import dump_config
from trainer.config.sections import MeshSection, MoESection, OptimizerSection, RecomputeSection
from trainer.kernels.table import PLAIN
from trainer.layers.base import Parallel
from trainer.layers.dispatch import Dispatch
from trainer.layers.experts import Experts
from trainer.layers.mlp import activated
from trainer.layers.router import Router, RowLayout
from trainer.layers.shapes import MLPShape, MoEShape
from trainer.models.family import family_of
from trainer.models.gpt.cost import active_parameters
from trainer.models.gpt.memory import block_bytes, expert_rows
from trainer.models.gpt.params import num_parameters
from trainer.models.gpt.shape import exchanges_tokens
from trainer.parallel.collectives import Group
from trainer.parallel.params import Place
from trainer.plan.check import check
from trainer.plan.kernel_choice import kernel_choices
from trainer.plan.memory import float8_bytes
from trainer.plan.plan import make_plan
from trainer.run.rehearsal import rehearse

SOAK = pytest.mark.soak
# Experts, groups, a shared one with a gate, two kinds of losses, a bias: one layer of four has an MLP.
MOE = MoESection(
    num_experts=6, top_k=2, ffn_hidden_size=16, layers=(1, 0, 1, 1), score="sigmoid", weight_scale=2.5, groups=3,
    groups_per_token=2, expert_bias=True, expert_bias_rate=0.25, balance_factor=0.5, z_loss_factor=0.1,
    shared_ffn_hidden_size=24, shared_gate=True,
)  # fmt: skip
SIMPLE = MoESection(num_experts=4, top_k=3, ffn_hidden_size=16, balance="microbatch", balance_factor=0.5)
SENT = {"expert_dispatch": "all_to_all"}
LAYOUTS = [
    (4, {"ep": 2, "tp": 2, "sequence_parallel": True}, {"sharding": "parameters", "recompute": "full"}),
    pytest.param(4, {"tp": 2, "pp": 2, "sequence_parallel": True, "schedule": "zb_h1"}, {}, marks=SOAK),
    pytest.param(
        4, {"tp": 2, "cp": 2, "sequence_parallel": True}, {"sharding": "parameters", "recompute": "full"}, marks=SOAK
    ),
    pytest.param(2, {}, {"sharding": "gradients"}, marks=SOAK),
    pytest.param(2, {"tp": 2}, {"recompute": "selective"}, marks=SOAK),
    pytest.param(2, {"tp": 2, "sequence_parallel": True}, {"sharding": "none"}, marks=SOAK),
    pytest.param(2, {"cp": 2}, {"documents": True}, marks=SOAK),
    pytest.param(2, {"pp": 2}, {"recompute": "full"}, marks=SOAK),
    pytest.param(2, {"pp": 2, "schedule": "zb_v"}, {"sharding": "gradients"}, marks=SOAK),
    pytest.param(2, {"pp": 2, "schedule": "interleaved"}, {}, marks=SOAK),
    pytest.param(4, {"tp": 2}, {"documents": True, "sharding": "parameters"}, marks=SOAK),
    pytest.param(8, {"tp": 2, "cp": 2, "pp": 2, "sequence_parallel": True}, {}, marks=SOAK),
    pytest.param(4, {"ep": 2, "pp": 2, "schedule": "zb_h1"}, {"sharding": "parameters"}, marks=SOAK),
    pytest.param(2, {"ep": 2}, {}, marks=SOAK),
    pytest.param(4, {"ep": 2}, {"sharding": "gradients", "recompute": "full"}, marks=SOAK),
    pytest.param(2, {"ep": 2}, {"recompute": "selective"}, marks=SOAK),
    pytest.param(4, {"ep": 2, "tp": 2}, {"documents": True}, marks=SOAK),
    pytest.param(4, {"ep": 2, "cp": 2}, {"documents": True}, marks=SOAK),
    pytest.param(2, {"ep": 2, "etp": 1, "tp": 2, "sequence_parallel": True}, {}, marks=SOAK),
    pytest.param(4, {"ep": 2, "etp": 1, "tp": 2, "sequence_parallel": True}, {"sharding": "gradients"}, marks=SOAK),
    pytest.param(8, {"ep": 2, "tp": 2, "pp": 2, "sequence_parallel": True}, {"recompute": "full"}, marks=SOAK),
    pytest.param(8, {"ep": 2, "cp": 2, "tp": 2, "sequence_parallel": True}, {"sharding": "none"}, marks=SOAK),
    (2, {"ep": 2, **SENT}, {"recompute": "full"}),
    (2, {"ep": 2, **SENT, "expert_buffer": 2.0}, {"recompute": "selective"}),
    pytest.param(4, {"ep": 2, **SENT}, {"sharding": "gradients", "recompute": "selective"}, marks=SOAK),
    pytest.param(4, {"ep": 2, "pp": 2, "schedule": "zb_h1", **SENT}, {"sharding": "parameters"}, marks=SOAK),
    pytest.param(4, {"ep": 2, "tp": 2, **SENT}, {"documents": True}, marks=SOAK),
    pytest.param(4, {"ep": 2, "tp": 2, "sequence_parallel": True, **SENT}, {"recompute": "full"}, marks=SOAK),
    pytest.param(4, {"ep": 2, "cp": 2, **SENT}, {"documents": True}, marks=SOAK),
    pytest.param(2, {"ep": 2, "etp": 1, "tp": 2, "sequence_parallel": True, **SENT}, {}, marks=SOAK),
    pytest.param(8, {"ep": 2, "cp": 2, "tp": 2, "sequence_parallel": True, **SENT}, {}, marks=SOAK),
]


def _config(moe=MOE, *, shape="llama", sharding="state", recompute="none", optimizer="adamw", dtype="fp64", **mesh):
    config = small_config(shape, dtype=dtype, optimizer=OptimizerSection(lr=1e-2, name=optimizer, sharding=sharding))
    model = replace(config.model, num_layers=4, moe=moe)
    return replace(config, model=model, mesh=MeshSection(**mesh), recompute=RecomputeSection(mode=recompute))


def _in_fp8(moe, **mesh):
    config = _config(moe, dtype="bf16", **mesh)
    return replace(config, precision=replace(config.precision, fp8="delayed"))


def _run(context, config, documents=False, rows=microbatches):
    """Reduced gradients of a step, and what three steps report and make of weights and biases."""
    engine = layouts(context, config)
    if config.model.lora is not None:
        draw_adapters(engine)
    batches = [rows(engine, step) for step in range(3)]
    if documents:
        batches = [with_documents(batch) for batch in batches]
    engine.add_gradients(batches[0], own_means=config.train.loss_average == "megatron")
    gradients = reduced(engine)
    engine.buffers.forget()
    reports = [engine.step(batch, 1e-2).read() for batch in batches]
    buffers = engine.model_buffers
    return {
        "gradients": gradients,
        "weights": logical(engine.optimizer.owned, engine.optimizer.state["weight"]),
        "buffers": [] if buffers is None else logical(buffers.holds, buffers.values),
        "named": [report.named_losses for report in reports],
        "counts": [report.counts for report in reports],
        "losses": [(report.loss, report.grad_norm) for report in reports],
    }


def _whole(config, ranks, documents=False, rows=microbatches):
    results = run_ranks(_run, ranks, config, documents, rows)
    whole = {
        key: assemble([part for one in results for part in one[key]]) for key in ("gradients", "weights", "buffers")
    }
    return {**results[0], **whole}


@functools.cache
def _alone(moe, documents=False, shape="llama"):
    return _whole(_config(moe, shape=shape), 1, documents=documents)


def _check_same(got, expected):
    check_same_gradients(got["gradients"], expected["gradients"])
    np.testing.assert_allclose(got["losses"], expected["losses"], rtol=1e-9)
    for kind in ("named", "counts"):
        for one, other in zip(got[kind], expected[kind], strict=True):
            assert one.keys() == other.keys() and one
            for name in one:
                np.testing.assert_allclose(one[name], other[name], rtol=1e-9, err_msg=name)
    for name, values in expected["weights"].items():
        np.testing.assert_allclose(got["weights"][name], values, rtol=1e-7, atol=1e-9, err_msg=name)
    for name, values in expected["buffers"].items():
        np.testing.assert_array_equal(got["buffers"][name], values, err_msg=name)


@pytest.mark.parametrize("ranks, mesh, options", LAYOUTS)
def test_layouts_compute_what_one_rank_does(ranks, mesh, options):
    options = dict(options)
    documents = options.pop("documents", False)
    got = _whole(_config(**options, **mesh), ranks, documents=documents)
    _check_same(got, _alone(MOE, documents))


def test_microbatches_of_several_rows_change_nothing():
    """Though their rows have different numbers of loss tokens."""
    config = _config()
    _check_same(_whole(replace(config, train=replace(config.train, micro_batch=2)), 1), _alone(MOE))


# Every pair of these. Eight experts, four of them for a token, so that sums over slots have more than two terms.
AXES = {
    "tp": (1, 2, 4), "sequence_parallel": (False, True), "cp": (1, 2), "pp": (1, 2), "dp": (1, 2, 4), "ep": (1, 2, 4),
    "etp": (1, 2), "dispatch": ("gather", "gather_buffer", "all_to_all", "buffer"), "documents": (False, True),
    "sharding": ("state", "none", "gradients", "parameters"), "recompute": ("none", "selective", "full"),
}  # fmt: skip
EIGHT = replace(MOE, num_experts=8, top_k=4, groups=4)
BIASED = replace(SIMPLE, num_experts=8, balance="sequence")


def _ranks(row):
    return row["tp"] * row["cp"] * row["pp"] * row["dp"]


def _can_be(row):
    of_stage = _ranks(row) // row["pp"]
    if not 2 <= _ranks(row) <= 8 or of_stage % (row["ep"] * row["etp"]) or row["tp"] % row["etp"]:
        return False
    if row["sequence_parallel"] and row["tp"] == 1:
        return False
    if row["etp"] < row["tp"] and not row["sequence_parallel"]:
        return False
    return row["ep"] > 1 or row["dispatch"] == "gather"


ROWS = pairwise(AXES, valid=_can_be, seed=49)


def _of_row(number, **changes):
    """The run of a row; schedules and forms of experts in turn."""
    row = ROWS[number]
    moe, shape = ((EIGHT, "llama"), (BIASED, "gpt2"))[number % 2]
    schedule = ("1f1b", "zb_h1", "interleaved", "zb_v")[number // 2 % 4] if row["pp"] > 1 else "1f1b"
    sent = {
        "gather": {},
        "gather_buffer": {"expert_buffer": 8.0},
        "all_to_all": SENT,
        "buffer": {**SENT, "expert_buffer": 8.0},
    }[row["dispatch"]]
    mesh = {name: row[name] for name in ("tp", "cp", "pp", "ep", "etp", "sequence_parallel")}
    options = {"sharding": row["sharding"], "recompute": row["recompute"], **changes}
    config = _config(moe, shape=shape, schedule=schedule, **mesh, **sent, **options)
    model = replace(config.model, num_heads=8, head_dim=4, num_kv_heads=8 if shape == "gpt2" else None)
    return replace(config, model=model, train=replace(config.train, global_batch=8))


def test_every_row_of_the_cover_can_run():
    assert len(ROWS) < 60
    assert not [problem for n, row in enumerate(ROWS) for problem in check(_of_row(n), _ranks(row), facts=None)]
    assert {(row["ep"], row["dispatch"]) for row in ROWS} >= {(n, d) for n in (2, 4) for d in AXES["dispatch"]}


@functools.cache
def _row_alone(config, documents):
    return _whole(config, 1, documents)


@SOAK
@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda n: "-".join(f"{k}={v}" for k, v in ROWS[n].items()))
def test_every_row_computes_what_one_rank_does(number):
    row, config = ROWS[number], _of_row(number)
    one = replace(config.optimizer, sharding="none")
    one_rank = replace(config, mesh=MeshSection(), recompute=RecomputeSection(), optimizer=one)
    expected = _row_alone(one_rank, row["documents"])
    _check_same(_whole(config, _ranks(row), row["documents"]), expected)


@SOAK
@pytest.mark.parametrize("number", [n for n, row in enumerate(ROWS) if row["cp"] * row["dp"] > 1 and n % 2])
def test_overlap_changes_no_bit_of_a_row(number):
    """Communication in turn, and overlapped with every rank late at random; fp32."""
    row, config = ROWS[number], _of_row(number, dtype="fp32")
    in_turn, overlapped = (
        replace(config, optimizer=replace(config.optimizer, overlap_grad_reduce=overlap, overlap_param_gather=overlap))
        for overlap in (False, True)
    )
    ranks, documents = _ranks(row), row["documents"]
    _same_bits(run_ranks(_train, ranks, in_turn, None, documents), run_ranks(_train, ranks, overlapped, 7, documents))


@SOAK
@pytest.mark.parametrize(
    "ranks, mesh",
    [
        (2, {"tp": 2, "sequence_parallel": True}),
        (2, {"tp": 2}),
        (2, {"cp": 2}),
        (2, {"pp": 2}),
        (4, {"ep": 4}),
        (4, {"tp": 2, "ep": 2}),
        (4, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True}),
        (4, {"ep": 4, **SENT}),
        (4, {"tp": 2, "ep": 2, **SENT}),
        (4, {"tp": 2, "ep": 4, "etp": 1, "sequence_parallel": True, **SENT}),
    ],
)
def test_experts_with_biases_and_balance_of_microbatches(ranks, mesh):
    _check_same(_whole(_config(SIMPLE, shape="gpt2", **mesh), ranks), _alone(SIMPLE, shape="gpt2"))


def test_an_expert_bias_changes_with_an_applied_step_only():
    (found,) = run_ranks(_without_loss, 1, _config())
    before, skipped, after = found
    np.testing.assert_array_equal(before, skipped)
    assert set(np.abs(after - before)) <= {0.0, 0.25} and (after != before).any()


def _without_loss(context, config):
    engine, found = layouts(context, config), []
    batch = microbatches(engine, 0)
    for batches in ([], [replace(one, loss_mask_BS=torch.zeros_like(one.loss_mask_BS)) for one in batch], batch):
        if batches:
            engine.evaluate(batch)
            engine.step(batches, 1e-2).read()
        found.append(engine.model_buffers.values.numpy().copy())
    return found


def _all_to_one(context, config):
    """A step in which the bias makes every token choose expert 1."""
    engine = layouts(context, config)
    engine.model_buffers.values.view(-1, config.model.moe.num_experts)[:, 1] = 100.0
    report = engine.step(microbatches(engine, 0), 1e-2).read()
    return report.loss, report.grad_norm, report.counts


@pytest.mark.parametrize("mesh", [{}, SENT], ids=["gather", "all to all"])
def test_one_expert_that_gets_every_token_is_reported(mesh):
    moe = replace(SIMPLE, top_k=1, score="sigmoid", expert_bias=True, balance="none", balance_factor=0.0)
    (loss, norm, counts), *others = run_ranks(_all_to_one, 1, _config(moe))
    tokens = 4 * 16
    assert not others and norm > 0
    assert [list(layer)[:4] for layer in counts.values()] == [[0, tokens, 0, 0]] * 4
    for got_loss, got_norm, got_counts in run_ranks(_all_to_one, 2, _config(moe, ep=2, **mesh)):
        assert (got_loss, got_norm) == pytest.approx((loss, norm), rel=1e-10)
        assert [list(layer)[:4] for layer in got_counts.values()] == [[0, tokens, 0, 0]] * 4


def _experts(activation="swiglu", bias=True):
    alone = Dispatch(Parallel(Group.single("tp"), sequence_parallel=False), {})
    layer = Experts(MLPShape(width=4, inner=6, activation=activation, bias=bias), 3, alone, kernels=PLAIN).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layer


@pytest.mark.parametrize("activation", ["swiglu", "quick_geglu", "squared_relu"])
@pytest.mark.parametrize(
    "experts",
    [[[0, 2], [2, 0], [0, 2]], [[1, 1], [1, 1], [1, 1]], [[3, 0], [1, 3], [3, 3]]],
    ids=["an empty expert", "all to one", "dropped slots"],
)
def test_experts_compute_the_sum_over_slots_and_its_gradient(experts, activation):
    layer, expert_NK = _experts(activation), torch.tensor(experts)
    generator = torch.Generator().manual_seed(2)
    x_ND = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    weight_NK = torch.where(expert_NK < 3, torch.rand(3, 2, generator=generator, dtype=torch.float64), 0.0)

    def compute(x, weight, *parameters):
        state = dict(zip((name for name, _ in layer.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(layer, state, (x, expert_NK, weight), {"all_computed": False})

    out_ND = torch.zeros_like(x_ND)
    for n, row in enumerate(experts):
        for k, e in enumerate(row):
            if e < 3:
                up = layer.up[e] @ x_ND[n] + layer.up_bias[e]
                y = layer.down[e] @ activated(up.unsqueeze(0), layer.shape, layer.kernels)[0] + layer.down_bias[e]
                out_ND[n] += (weight_NK[n, k] * y).detach()
    inputs = [each.detach().clone().requires_grad_() for each in (x_ND, weight_NK, *layer.parameters())]
    torch.testing.assert_close(compute(*inputs), out_ND)
    compute(*inputs).square().sum().backward()
    assert all(each.grad is not None for each in inputs), "zeros for experts without tokens"

    def masked(x, weight, *parameters):  # the weight of a dropped slot is the constant 0
        return compute(x, torch.where(expert_NK < 3, weight, 0.0), *parameters)

    if activation != "squared_relu":
        assert torch.autograd.gradcheck(masked, inputs, fast_mode=True)


@pytest.mark.parametrize("drop", ["weight", "position"])
@pytest.mark.parametrize("of", ["row", "microbatch"])
def test_the_capacity_of_an_expert_is_counted_over_rows_or_the_microbatch(drop, of):
    shape = MoEShape(
        num_experts=3, top_k=1, ffn_hidden_size=4, capacity_factor=1.0, capacity_of=of, drop=drop, score="sigmoid"
    )
    router = Router(shape, 2, Parallel(Group.single("tp"), sequence_parallel=False), bias=False)
    expert_NK = torch.tensor([0, 0, 0, 1, 2, 2, 0, 0, 0, 0, 0, 1]).unsqueeze(1)  # two rows of six tokens
    weight_NK = torch.tensor([0.1, 0.3, 0.2, 0.4, 0.5, 0.6, 0.7, 0.2, 0.8, 0.25, 0.9, 0.1]).unsqueeze(1)
    kept = router.kept(expert_NK, weight_NK, RowLayout(2, 6, Group.single("cp"))).flatten().tolist()
    expected = {
        # ceil(6 / 3) = 2 slots of each expert in a row; ceil(12 / 3) = 4 in the microbatch, second tokens after first.
        ("row", "weight"): [0, 1, 1, 1, 1, 1, 0, 0, 1, 0, 1, 1],
        ("row", "position"): [1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1],
        ("microbatch", "weight"): [0, 1, 0, 1, 1, 1, 1, 0, 1, 0, 1, 1],
        ("microbatch", "position"): [1, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1],
    }
    assert [int(each) for each in kept] == expected[of, drop]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"top_k": 7}, "model.moe.top_k=7 is above model.moe.num_experts=6; choose at most 6"),
        ({"layers": (1, 0, 1)}, "model.moe.layers has 3 entries, but model.num_layers=4"),
        ({"layers": (0, 0, 0, 0)}, "model.moe.layers has no layer with experts"),
        ({"interval": 2}, "model.moe.interval=2 and model.moe.layers are both set"),
        ({"groups": 4}, "model.moe.num_experts=6 cannot be divided into model.moe.groups=4; choose from 1, 2, 3, 6"),
        ({"groups": None}, "model.moe.groups_per_token=2 needs model.moe.groups"),
        ({"groups_per_token": 4}, "model.moe.groups_per_token=4 is above model.moe.groups=3"),
        (
            {"top_k": 3},
            "model.moe.top_k=3 experts cannot be chosen evenly from model.moe.groups_per_token=2 groups of 2",
        ),
        (
            {"top_k": 5, "group_score": "max"},
            "model.moe.top_k=5 is above the 4 experts of model.moe.groups",
        ),
        (
            {"groups_per_token": None, "group_score": "max"},
            'model.moe.group_score="max" needs model.moe.groups_per_token',
        ),
        ({"score": "softmax"}, 'model.moe.expert_bias=True needs model.moe.score="sigmoid", not "softmax"'),
        ({"shared_ffn_hidden_size": None}, "model.moe.shared_gate=True needs model.moe.shared_ffn_hidden_size"),
        ({"drop": "position"}, 'model.moe.drop="position" needs a model.moe.capacity_factor'),
    ],
)
def test_experts_that_cannot_be_are_refused(change, message):
    config = _config(replace(MOE, **change))
    (problem,) = [*family_of(config).problems(config)]
    assert problem.startswith(message)


def test_the_bias_of_a_router_begins_as_its_weights_do():
    config = _config(SIMPLE, shape="gpt2")
    family = family_of(config)
    specs = {spec.name: spec.std for spec in family.parameters(family.shape(config, 256), Place())}
    routers = {name: std for name, std in specs.items() if ".router." in name}
    assert len(routers) == 8 and set(routers.values()) == {config.model.init_std}


def test_a_capacity_needs_whole_rows():
    config = _config(replace(MOE, capacity_factor=1.25), cp=2)
    (problem,) = [*family_of(config).problems(config)]
    assert "limit for the tokens of whole rows, but mesh.cp=2 divides rows among ranks" in problem


def test_of_experts_those_of_a_token_count_as_active():
    config = _config()
    shape = family_of(config).shape(config, 256)
    idle = 3 * (6 - 2) * 3 * 16 * shape.hidden_size  # three layers of six experts, two of them for a token
    assert num_parameters(shape) - active_parameters(shape) == idle


def _saved(context, config, root):
    """A checkpoint after two steps, and the state that this rank holds."""
    engine = layouts(context, config)
    for step in range(2):
        engine.step(microbatches(engine, step), 1e-2).read()
    run = RunState(step=2, consumed_samples=8, data_id="", data={}, optimizer_steps=2, config=dump_config(config))
    return save_engine(engine, root, run=run), _state(engine)


def _loaded(context, config, folder):
    engine = layouts(context, config)
    engine.load(str(folder))
    return _state(engine)


def _state(engine):
    optimizer = engine.optimizer
    optimizer.gathers.release()
    return {name: logical(optimizer.holds[name], values.clone()) for name, values in optimizer.state.items()}


def test_a_checkpoint_of_four_ranks_of_experts_is_that_of_other_layouts(tmp_path):
    saved = run_ranks(_saved, 4, _config(SIMPLE, ep=4), tmp_path)
    expected = {state: assemble([part for _, held in saved for part in held[state]]) for state in saved[0][1]}
    assert expected["weight"]["blocks.0.mlp.experts.up.weight"].shape == (4, 16, 32)
    for ranks, mesh in ((1, {}), (2, {"ep": 2}), (2, {"tp": 2})):
        loaded = run_ranks(_loaded, ranks, _config(SIMPLE, **mesh), saved[0][0])
        for state, tensors in expected.items():
            whole = assemble([part for held in loaded for part in held[state]])
            assert whole.keys() == tensors.keys()
            for name, values in tensors.items():
                np.testing.assert_array_equal(whole[name], values, err_msg=f"{state}/{name} with {mesh}")


@SOAK
@pytest.mark.parametrize("ranks, mesh", [(2, {"ep": 2}), (4, {"ep": 2, "tp": 2, "etp": 1, "sequence_parallel": True})])
def test_muon_takes_each_expert_of_each_rank_for_a_matrix(ranks, mesh):
    alone = _whole(_config(SIMPLE, optimizer="muon"), 1)
    _check_same(_whole(_config(SIMPLE, optimizer="muon", **mesh), ranks), alone)


@pytest.mark.parametrize(
    ("ranks", "mesh", "message"),
    [
        (4, {"ep": 4}, "model.moe.num_experts=6 is not a multiple of mesh.ep=4; choose mesh.ep from 1, 2, 3, 6"),
        (
            2,
            {"ep": 3},
            "2 ranks of a pipeline stage cannot be divided into mesh.ep=3 x mesh.etp=1; start 3 ranks, or choose a "
            "product that divides 2",
        ),
        (
            4,
            {"tp": 4, "etp": 3, "sequence_parallel": True},
            "mesh.etp=3 does not divide mesh.tp=4; choose from 1, 2, 4",
        ),
        (2, {"tp": 2, "etp": 1}, "mesh.etp=1 is below mesh.tp=2, whose ranks all have the same tokens; set"),
        (2, {"ep": 2, **SENT}, 'mesh.expert_dispatch="all_to_all" waits for the host, which kernels.cuda_graphs="on"'),
        (2, {"ep": 2, **SENT, "expert_buffer": 0.5}, "mesh.expert_buffer=0.5 is below 1, an even load"),
    ],
)
def test_ranks_that_cannot_share_experts_are_refused(ranks, mesh, message):
    config = _config(**mesh)
    graphs = "on" if "expert_dispatch" in mesh else "auto"
    config = replace(config, kernels=replace(config.kernels, cuda_graphs=graphs))
    problems = check(config, ranks, facts=None)
    assert [problem for problem in problems if problem.startswith(message)], problems


def test_a_model_without_experts_has_no_ranks_for_them():
    (problem,) = check(_config(None, ep=2), 2, facts=None)
    assert problem == "mesh.ep=2 divides experts, but the model has none; leave it out, or add [model.moe]"


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (16, {"tp": 2, "ep": 2, "pp": 2, "sequence_parallel": True}),
        pytest.param(8, {"tp": 2, "ep": 2, "etp": 1, "cp": 2, "sequence_parallel": True}, marks=SOAK),
        pytest.param(12, {"ep": 3, "pp": 2, "schedule": "zb_v"}, marks=SOAK),
        pytest.param(4, {"ep": 2, **SENT}, marks=SOAK),
        (4, {"ep": 2, **SENT, "expert_buffer": 1.5}),
    ],
)
def test_all_ranks_of_a_layout_are_rehearsed(ranks, mesh):
    config = _config(**mesh)
    config = replace(config, train=replace(config.train, global_batch=12))
    result = rehearse(config, make_plan(config, ranks, facts=None))
    assert result.matched.collectives and result.num_runs < ranks


@pytest.mark.parametrize(
    ("shared", "gate"), [*(pytest.param(*x, marks=SOAK) for x in ((None, False), (64, False))), (64, True)]
)
def test_what_experts_keep_under_fp8_is_what_a_plan_says(shared, gate):
    """What FP8 adds is the linear layers' rounded weights: experts keep their inputs as they are."""
    moe = replace(SIMPLE, num_experts=32, shared_ffn_hidden_size=shared, shared_gate=gate)
    held, told = [], []
    for fp8 in ("delayed", "none"):
        config = _in_fp8(moe)
        config = replace(config, precision=replace(config.precision, fp8=fp8))
        shape = family_of(config).shape(config, 256)
        block = block_bytes(
            shape, Place(), tokens=16, element=2, recompute=config.recompute, float8=fp8 != "none", experts=True
        )
        held.append(run_ranks(kept_bytes, 1, config)[0])
        told.append(4 * block)
    table = family_of(config).parameters(shape, Place())
    weights = float8_bytes(_in_fp8(moe).precision, make_plan(config, 1, facts=None), table=table)
    assert held[0] - held[1] - weights == pytest.approx(told[0] - told[1], abs=200)  # of scales


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_what_experts_keep_for_backward_is_what_a_plan_says(mode):
    moe = replace(SIMPLE, shared_ffn_hidden_size=64, shared_gate=True)
    config = replace(_config(moe, dtype="fp32"), recompute=RecomputeSection(mode=mode))
    config = replace(config, train=replace(config.train, micro_batch=4))
    (held,) = run_ranks(kept_bytes, 1, config)
    shape = family_of(config).shape(config, 256)
    tokens = 4 * config.train.sequence_length
    block = block_bytes(shape, Place(), tokens=tokens, element=4, recompute=config.recompute, experts=True)
    assert 4 * block == pytest.approx(held, rel=0.015)


@pytest.mark.parametrize(
    ("mesh", "rows"),
    [
        ({}, 4 * 2 * 100),  # by gathering: two of four experts for each token of four ranks
        ({"expert_buffer": 1.5}, 1.5 * 3 * 100),
        ({"expert_buffer": 9.0}, 4 * 2 * 100),
        (SENT, 1.25 * 3 * 100),
        ({**SENT, "expert_buffer": 2.0}, 2 * 3 * 100),
        ({**SENT, "expert_buffer": 9.0}, 4 * 2 * 100),
    ],
)
def test_a_plan_has_rows_for_the_dispatch_that_is_set(mesh, rows):
    config = _config(replace(SIMPLE, num_experts=8), ep=4, **mesh)
    moe = family_of(config).shape(config, 256).moe
    gathers = {} if mesh.get("expert_dispatch") else {"dispatch": "gather"}
    assert expert_rows(replace(moe, **gathers), Place(ep_size=4), 100) == rows


@SOAK
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_experts_train_in_16_bits(dtype):
    """With experts that drop, too; the first steps of fp16 are skipped until its scale has fallen."""
    moe, steps = replace(MOE, capacity_factor=0.7), 3 if dtype == "bf16" else 1
    found, exact = (_whole(_config(moe, dtype=each), 1)["losses"][:steps] for each in (dtype, "fp64"))
    np.testing.assert_allclose([loss for loss, _ in found], [loss for loss, _ in exact], rtol=0.02)


def _trained_in_fp8(context, config):
    engine = layouts(context, config)
    losses = [engine.step(microbatches(engine, step), 1e-2).read().loss for step in range(2)]
    return losses, engine.float8.to_numbers()


def test_ranks_whose_blocks_have_other_layers_agree_about_fp8():
    """Dense blocks on the first rank, experts on the second: other linear layers, and experts are none."""
    moe = replace(SIMPLE, layers=(0, 0, 1, 1))
    (alone,) = run_ranks(_trained_in_fp8, 1, _in_fp8(moe))
    attention = {f"{n}.attention.{part}" for n in range(4) for part in ("qkv", "out")}
    assert alone[1].keys() == attention | {f"{n}.mlp.{part}" for n in (0, 1) for part in ("up", "down")}
    for losses, history in run_ranks(_trained_in_fp8, 2, _in_fp8(moe, pp=2)):
        assert (losses, history) == alone


def test_a_plan_in_fp8_counts_experts_in_16_bits_and_says_so():
    config = _in_fp8(replace(SIMPLE, shared_ffn_hidden_size=32))
    plan = make_plan(config, 1, facts=None)
    how = {"tokens": 64, "document_lengths": plan.document_lengths, "element": 2, "recompute": config.recompute}
    cost = functools.partial(family_of(config).stage_cost, plan.shape, Place(), **how)
    whole, rounded = cost(), cost(float8=config.precision.float8_blocks(4))
    linear = 3 * 32 * 32 + 3 * 32 * 32  # attention, with half as many heads of keys and values, and the shared expert
    assert rounded.float8_flops == 6 * 64 * 4 * linear
    assert rounded.float8_flops + rounded.product_flops == pytest.approx(whole.product_flops)
    (choice,) = [each for each in kernel_choices(config, plan, device="gpu") if each.operation == "products of experts"]
    assert choice.reason == "in bf16: only linear layers are computed in FP8"


@pytest.mark.parametrize(("shared", "problem"), [(None, ""), (24, "model.moe.shared_ffn_hidden_size / mesh.tp is 24,")])
def test_widths_of_experts_are_free_under_fp8_but_a_shared_one_is_a_linear_layer(shared, problem):
    config = _in_fp8(replace(SIMPLE, ffn_hidden_size=20, shared_ffn_hidden_size=shared))
    config = replace(config, model=replace(config.model, ffn_hidden_size=40))  # of no layer
    problems = [each for each in check(config, 1, facts=None) if "FP8" in each]
    assert [each[: len(problem)] for each in problems] == [problem] * bool(problem)


@pytest.mark.parametrize(
    ("ep", "top_k", "dispatch", "graphs", "expected"),
    [
        (2, 1, "auto", "auto", False),
        (4, 8, "auto", "auto", False),
        (8, 8, "auto", "auto", True),
        (4, 2, "auto", "auto", True),
        (4, 2, "auto", "on", False),
        (4, 2, "gather", "auto", False),
        (2, 8, "all_to_all", "auto", True),
    ],
)
def test_tokens_are_gathered_where_that_moves_little(ep, top_k, dispatch, graphs, expected):
    config = _config(replace(SIMPLE, num_experts=16, top_k=top_k), ep=ep, expert_dispatch=dispatch)
    assert exchanges_tokens(replace(config, kernels=replace(config.kernels, cuda_graphs=graphs))) is expected
