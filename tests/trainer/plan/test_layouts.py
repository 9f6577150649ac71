"""Estimated speed and memory of layouts, against measured runs; and the list of layouts that fit."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.one_gpu import run_config
from benchmarks.one_gpu_options import row_config
from benchmarks.several_gpus import ROWS as ROWS_OF_TWO
from benchmarks.several_gpus import SECTIONS
from benchmarks.several_gpus import row_config as several_row
from tests.helpers.examples import examples
from tests.trainer.plan.test_plan import config as sound
from tests.trainer.plan.test_plan import vars_of
from trainer.config.parse import parse_config
from trainer.config.sections import MeshSection, RecomputeSection
from trainer.models.family import family_of
from trainer.parallel.params import Place
from trainer.plan import layouts
from trainer.plan.check import check
from trainer.plan.devices import GIB, PRODUCTS, STEP_S, device_named
from trainer.plan.layouts import Hardware, find_layouts, problems_of_every_layout
from trainer.plan.memory import USABLE, activation_bytes, state_bytes
from trainer.plan.plan import make_plan
from trainer.plan.step_time import Rates, exposed_data_parallel, step_time

H200, H100 = device_named("NVIDIA H200"), device_named("NVIDIA H100 80GB HBM3")
# (shape, row) -> tokens/s of one H200 in bf16, benchmarks/one_gpu_options.py and one_gpu.py; GiB at most
ONE = {
    ("llama1b", "none"): (63_725, 30.66),
    ("llama1b", "selective"): (62_712, 27.66),
    ("llama1b", "full"): (50_535, 22.61),
    ("llama1b", "full-4"): (50_584, 23.60),
    ("llama1b", "block-8"): (56_434, 26.50),
    ("gpt1.3b", "none"): (63_565, 34.46),
    ("gpt1.3b", "selective"): (62_150, 29.96),
    ("gpt1.3b", "full"): (49_752, 24.25),
    ("llama3b", "none"): (24_971, 64.11),
    ("llama3b", "selective"): (24_851, 61.11),
}
# row of benchmarks/several_gpus.py -> tokens/s of each of two H200s, GiB
TWO = {
    "llama3b-32k-cp2": (13_880, 77.18),
    "llama3b-32k-tp2": (13_114, 66.49),
    "llama1b-128k-cp2": (12_207, 92.37),
    "llama1b-128k-tp2": (11_397, 86.90),
}
# the same of two H100s of 80 GB; docs/design/parallel.md has the rows whose speed the estimate misses, and why
TWO_H100 = {"llama4b-dp2": (20_307, 58.53), "llama4b-dp2-fp8": (28_377, 64.96), "llama5b-pp2-zb_v": (16_407, 57.70)}
FLOAT8 = (78_314, 31.2)  # tokens/s of llama1b on one H200, "delayed"; GiB
MIXERS = {"mamba2-1.3b": 41.8, "hybrid-8l": 29.6}  # shape of benchmarks/one_gpu.py -> GiB with our Triton kernels
EXPERTS = {"qwen3moe-4l": 101_524, "mixtral8x1b": 58_722}  # the same -> tokens/s of one H200
# rows of benchmarks/several_gpus.py -> tokens/s of each GPU, where no host was waited for
TENSOR_PARALLEL = {
    ("gpt1.3b-tp2+graphs", H200): 45_035,
    ("llama7b-tp4+graphs", H200): 8_794,
    ("llama7b-tp4+graphs", H100): 8_582,
    ("llama7b-tp2", H100): 10_362,
    ("llama7b-tp2-pp2-zb_v", H200): 10_563,
    ("llama7b-tp2-pp2-interleaved", H200): 10_118,
}


def _measured():
    yield from ((row_config(row, shape), 1, H200, *found) for (shape, row), found in ONE.items())
    config = row_config("none", "llama1b")
    precision = dataclasses.replace(config.precision, fp8="delayed")
    yield dataclasses.replace(config, precision=precision), 1, H200, *FLOAT8
    yield from ((several_row(row), 2, H200, *found) for row, found in TWO.items())
    yield from ((several_row(row), 2, H100, *found) for row, found in TWO_H100.items())


@pytest.mark.parametrize(
    ("config", "ranks", "device", "speed", "gib"),
    list(_measured()),
    ids=[*map("-".join, ONE), "llama1b-fp8", *TWO, *TWO_H100],
)
def test_estimates_are_near_what_was_measured(config, ranks, device, speed, gib):
    """10 % of the speed, 5 % of the memory."""
    plan = make_plan(config, ranks, facts=None)
    time = step_time(config, plan, Rates(device=device, gpus_per_node=8))
    assert plan.tokens_per_step / ranks / time.total == pytest.approx(speed, rel=0.1)
    assert (state_bytes(config, plan) + activation_bytes(config, plan)) / GIB == pytest.approx(gib, rel=0.05)


@pytest.mark.parametrize(("shape", "gib"), MIXERS.items())
def test_mixers_keep_what_their_kernels_keep(shape, gib):
    """Less where convolution, scan and norm are computed again in backward: as plain kernels do it, or selectively."""
    config = run_config(shape)
    plan = make_plan(config, 1, facts=None)
    kept = activation_bytes(config, plan)
    assert (state_bytes(config, plan) + kept) / GIB == pytest.approx(gib, rel=0.01)
    plain = dataclasses.replace(config, kernels=dataclasses.replace(config.kernels, scan="plain"))
    again = dataclasses.replace(config, recompute=RecomputeSection(mode="selective"))
    assert activation_bytes(again, plan) < activation_bytes(plain, plan) < 0.85 * kept


@pytest.mark.parametrize(("shape", "speed"), EXPERTS.items())
def test_estimates_with_experts_are_near_what_was_measured(shape, speed):
    config = run_config(shape)
    plan = make_plan(config, 1, facts=None)
    time = step_time(config, plan, Rates(device=H200, gpus_per_node=8))
    assert plan.tokens_per_step / time.total == pytest.approx(speed, rel=0.1)


def test_more_ranks_with_experts_leave_each_more_rows():
    """Products of more rows are faster, but each rank that gathers moves the rows of all."""
    times = []
    for row in ("qwen3moe-4l-ep2", "qwen3moe-4l-ep2-sent"):
        config = several_row(row)
        times.append(step_time(config, make_plan(config, 2, facts=None), Rates(device=H200, gpus_per_node=8)))
    alone = run_config("qwen3moe-4l")
    whole = step_time(alone, make_plan(alone, 1, facts=None), Rates(device=H200, gpus_per_node=8))
    assert times[0].products == pytest.approx(times[1].products) and times[0].products < 0.95 * whole.products
    assert times[0].memory > times[1].memory
    assert times[1].idle - times[0].idle > 0.05  # the host waits to know how many tokens there are


@pytest.mark.parametrize(("row", "device"), TENSOR_PARALLEL)
def test_estimates_of_tensor_parallelism_are_near_what_was_measured(row, device):
    config, ranks = several_row(row), ROWS_OF_TWO[row.partition("+")[0]][0]
    plan = make_plan(config, ranks, facts=None)
    time = step_time(config, plan, Rates(device=device, gpus_per_node=8))
    assert plan.tokens_per_step / ranks / time.total == pytest.approx(TENSOR_PARALLEL[row, device], rel=0.1)
    assert time.idle < 0.05 * time.total


def test_a_slow_host_takes_its_launches_from_tensor_parallelism_alone():
    """llama7b of H200s whose host took 8.74 us for a launch; graphs, and ranks without tp, do not wait for it."""
    seconds = {}
    for row in ("llama7b-tp4", "llama7b-tp4+graphs", "llama7b-dp4"):
        config = several_row(row)
        plan = make_plan(config, 4, facts=None)
        for launch in (1e-6, 8.74e-6):
            seconds[row, launch] = step_time(config, plan, Rates(device=H200, gpus_per_node=8, launch=launch)).total
    tokens = make_plan(several_row("llama7b-tp4"), 4, facts=None).tokens_per_step / 4
    assert tokens / seconds["llama7b-tp4", 8.74e-6] == pytest.approx(5_359, rel=0.1)
    assert tokens / seconds["llama7b-tp4", 1e-6] == pytest.approx(8_769, rel=0.1)
    for row in ("llama7b-tp4+graphs", "llama7b-dp4"):
        assert seconds[row, 1e-6] == seconds[row, 8.74e-6]


def test_graphs_leave_tensor_parallelism_its_communication():
    """One by one the host, which differs between machines, limits the step of llama7b on tp 4."""
    graphs, eager = (
        step_time(config, make_plan(config, 4, facts=None), Rates(device=H200, gpus_per_node=8))
        for config in map(several_row, ("llama7b-tp4+graphs", "llama7b-tp4"))
    )
    assert graphs.tensor_parallel == eager.tensor_parallel > 0.25 * graphs.total
    assert eager.idle > 0.5 > graphs.idle


def test_graphs_of_data_parallel_ranks_leave_two_microbatches_to_the_host_where_passes_overlap():
    """The first and the last: of 4 half, of 8 a quarter of what is waited for without graphs."""
    shape = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "vocab_size": 512, "tie_embeddings": False}
    waits = {}
    for batch in (8, 16):
        for graphs, overlap in (("off", "off"), ("on", "off"), ("on", "on")):
            train, kernels = (
                {"global_batch": batch, "micro_batch": 1},
                {"cuda_graphs": graphs, "overlap_passes": overlap},
            )
            config = sound(mesh={"tp": 2}, model=shape, train=train, kernels=kernels)
            plan = make_plan(config, 4, facts=None)
            waits[batch, graphs, overlap] = step_time(config, plan, Rates(device=H100, gpus_per_node=8)).idle - STEP_S
        assert waits[batch, "on", "off"] < waits[batch, "off", "off"] / 10
    assert waits[8, "on", "on"] == pytest.approx(waits[8, "off", "off"] / 2)
    assert waits[16, "on", "on"] == pytest.approx(waits[16, "off", "off"] / 4)


@pytest.mark.parametrize("row", ROWS_OF_TWO)
def test_rows_of_several_gpus_are_runs_that_can_start(row):
    """Those whose GPUs this project has not had: no problem, and every key of a row is one of the run's."""
    config, (ranks, *_, keys) = several_row(row), ROWS_OF_TWO[row]
    assert check(config, ranks, facts=None) == []
    sections = [vars_of(getattr(config, name)) for name in SECTIONS]
    assert keys.items() <= {item for section in sections for item in section}


@pytest.mark.parametrize("row", [row for row, (ranks, *_) in ROWS_OF_TWO.items() if ranks == 8])
def test_rows_of_eight_gpus_fit_80_gb(row):
    """Memory by the plan; layouts of eight have not been run yet."""
    config = several_row(row)
    plan = make_plan(config, 8, facts=None)
    needed = state_bytes(config, plan) + activation_bytes(config, plan)
    assert 10 * GIB < needed < USABLE * H100.memory_bytes


def test_the_operations_of_a_stage_are_those_of_the_model():
    """Stages and ranks add up to the family's operations per token, which count the head and attention whole."""
    config = sound(mesh={"tp": 1}, model={"vocab_size": 1024})
    plan = make_plan(config, 4, facts=None)
    cost = family_of(config).stage_cost
    how = {"tokens": 64, "document_lengths": plan.document_lengths, "element": 2, "recompute": RecomputeSection()}
    whole = cost(plan.shape, Place(), **how)
    split = [
        cost(plan.shape, Place(tp_rank=r, tp_size=2, stage=s, num_stages=2), **how) for r in range(2) for s in range(2)
    ]
    assert sum(c.product_flops for c in split) == pytest.approx(whole.product_flops)
    assert sum(c.attention_flops for c in split) == pytest.approx(whole.attention_flops)
    matrices = plan.num_parameters - (2 * plan.shape.num_layers + 1) * plan.shape.hidden_size
    assert whole.product_flops == 6 * 64 * matrices
    full = cost(plan.shape, Place(), **{**how, "recompute": RecomputeSection(mode="full")})
    apart = cost(plan.shape, Place(), **{**how, "document_lengths": (plan.sequence_length // 4,)})
    assert apart.attention_flops == pytest.approx(whole.attention_flops / 4)
    head = 6 * 64 * plan.shape.hidden_size * 1024
    assert full.product_flops - head == pytest.approx((whole.product_flops - head) * 4 / 3)
    assert full.attention_flops == pytest.approx(whole.attention_flops * 4.5 / 3.5)
    inner = range(1, plan.shape.num_layers)
    rounded = cost(plan.shape, Place(), **how, float8=inner)
    assert rounded.product_flops + rounded.float8_flops == pytest.approx(whole.product_flops)
    assert rounded.float8_flops == pytest.approx((whole.product_flops - head) * len(inner) / plan.shape.num_layers)
    assert rounded.moved_bytes > whole.moved_bytes


def _hardware(gpus, nodes=1, gib=80):
    return Hardware(gpus=gpus, nodes=nodes, device=H200, memory_bytes=gib * GIB)


def _config(**train):
    return sound(model={"vocab_size": 32000}, mesh={"tp": 1}, train={"global_batch": 64, **train})


@examples(8)
@given(gpus=st.sampled_from([1, 2, 6, 8, 16]), nodes=st.sampled_from([1, 2]), gib=st.sampled_from([1, 80]))
def test_every_layout_runs_and_fits_or_says_why(gpus, nodes, gib):
    hardware = _hardware(gpus, nodes=min(nodes, gpus), gib=gib)
    found = find_layouts(_config(), hardware, facts=None)
    speeds = [layout.tokens_per_s for layout in found]
    assert speeds == sorted(speeds, reverse=True) and found
    assert len({(x.config.mesh.tp, x.config.mesh.cp, x.config.mesh.pp) for x in found}) == len(found), "a mesh once"
    for layout in found:
        if not layout.problem:
            assert not check(layout.config, gpus, facts=None)
            assert layout.memory_bytes <= USABLE * hardware.memory_bytes
        elif "GiB" not in layout.problem:
            assert layout.problem in check(layout.config, gpus, facts=None)


def test_what_does_not_fit_says_how_much_it_needs():
    (layout,) = find_layouts(row_config("none", "llama1b"), _hardware(1, gib=20), facts=None)
    assert layout.problem == "needs at least 21.77 GiB a GPU, 18.80 GiB can be used"


def test_what_does_not_fit_names_the_sharding_that_does():
    """The lowest sharding that fits is named; if none fits, the one with the least memory, as still too much."""
    config = row_config("none", "llama1b")

    def problem(gib, sharding="state"):
        run = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, sharding=sharding))
        found = find_layouts(run, _hardware(4, gib=gib), facts=None)
        return next(x.problem for x in found if (x.config.mesh.tp, x.config.mesh.cp, x.config.mesh.pp) == (1, 1, 1))

    assert problem(12).endswith(" GiB can be used; 9.16 GiB with optimizer.sharding=gradients")
    assert problem(9).endswith(" GiB can be used; 8.04 GiB with optimizer.sharding=parameters")
    assert problem(4).endswith(" GiB can be used; 8.04 GiB with optimizer.sharding=parameters, still too much")
    assert problem(4, "parameters").endswith("8.04 GiB a GPU, 3.76 GiB can be used")


def test_stages_of_equal_work_are_tried():
    """With equal numbers of layers all other ranks wait for the last one, which has the head."""
    config = _config(micro_batch=1, sequence_length=2048)
    sizes = {"num_layers": 16, "hidden_size": 1024, "num_heads": 1, "num_kv_heads": 1, "vocab_size": 128_000}
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **sizes))
    config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, dtype="bf16"))
    found = {x.config.mesh.pp: x.config.mesh for x in find_layouts(config, _hardware(4), facts=None)}
    assert [found[pp].stage_balance for pp in (1, 4)] == ["layers", "flops"]


def test_what_is_not_simulated_is_not_the_fastest(monkeypatch):
    """The twin simulates every choice."""
    config = _config(global_batch=32)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=8))
    simulated = []
    monkeypatch.setattr(layouts, "step_time", lambda *a, **k: (simulated.append(1), step_time(*a, **k))[1])
    found, count = find_layouts(config, _hardware(4), facts=None), len(simulated)
    real = layouts.busy_time
    monkeypatch.setattr(layouts, "busy_time", lambda *a, **k: dataclasses.replace(real(*a, **k), bubble=-1e-9))
    monkeypatch.setattr(layouts, "_fastest", _fastest_of_all)
    assert find_layouts(config, _hardware(4), facts=None) == found and count < len(simulated) - count


def _fastest_of_all(choices, hardware, *, best=None):
    for choice in choices:
        time = layouts.step_time(choice.config, choice.plan, Rates(device=hardware.device, gpus_per_node=4))
        speed = choice.plan.tokens_per_step / time.total
        if best is None or speed > best.tokens_per_s:
            best = layouts.Layout(config=choice.config, memory_bytes=choice.memory_bytes, time=time, tokens_per_s=speed)
    return best


@pytest.mark.parametrize("pp", [2, 4])
def test_a_pipeline_rank_computes_its_part_of_the_model(pp):
    """The last rank, which has the head too, is the slowest one; the estimate is for that rank."""
    config = row_config("none", "llama1b")
    plans, times = {}, {}
    for size in (1, pp):
        run = dataclasses.replace(config, mesh=MeshSection(pp=size))
        plans[size] = make_plan(run, size, facts=None)
        times[size] = step_time(run, plans[size], Rates(device=H200, gpus_per_node=8))
    plan = plans[1]
    head = 6 * plan.tokens_per_step * plan.shape.hidden_size * plan.padded_vocab_size / (PRODUCTS * H200.flops)
    assert 0 < head < times[1].products / 4
    assert times[pp].products - head == pytest.approx((times[1].products - head) / pp)
    assert times[pp].attention == pytest.approx(times[1].attention / pp)
    assert 1 < times[pp].memory * pp / times[1].memory < 1 + 0.2 * pp, "with the head, which moves memory too"


def test_tp_does_not_leave_a_machine():
    found = find_layouts(_config(), _hardware(8, nodes=4), facts=None)
    assert {layout.config.mesh.tp for layout in found} == {1, 2}
    found = find_layouts(_config(global_batch=24), _hardware(12, nodes=2), facts=None)
    assert {layout.config.mesh.tp for layout in found} == {1, 2, 3, 6}, "4 of 12 ranks would be on two machines"


def test_every_mesh_is_listed_and_those_of_other_sizes_than_powers_of_two_run():
    config = _config(global_batch=24)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=6))
    found = find_layouts(config, _hardware(6), facts=None)
    meshes = [(x.config.mesh.tp, x.config.mesh.cp, x.config.mesh.pp) for x in found]
    assert len(meshes) == len(set(meshes))
    sizes = itertools.product((1, 2, 3, 6), repeat=3)
    assert set(meshes) == {size for size in sizes if 6 % math.prod(size) == 0}
    runs = {mesh for mesh, layout in zip(meshes, found, strict=True) if not layout.problem}
    assert {(1, 1, 3), (1, 1, 6), (2, 1, 3)} <= runs


def test_what_is_hidden_of_data_parallel_communication():
    """In turn all of it counts; beside computation a bucket, or what takes longer than the pass beside it."""
    config = several_row("llama7b-dp2")

    def seconds(computed=3.0, **options):
        changed = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **options))
        return exposed_data_parallel(changed, make_plan(changed, 2, facts=None), rate=1e11, computed=computed)

    second = make_plan(config, 2, facts=None).parameters_per_rank / 2 / 1e11  # a byte of each parameter
    in_turn = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    assert seconds(**in_turn) == pytest.approx(6 * second)
    assert seconds(sharding="none", **in_turn) == pytest.approx(8 * second)
    assert seconds(sharding="parameters", **in_turn) == pytest.approx(8 * (4 + 2 * 2) * second)
    assert seconds() == pytest.approx(6 * second / 34), "blocks, embedding and head"
    assert seconds(computed=0.0) == pytest.approx(6 * second)


def test_the_estimate_of_a_pipeline_has_its_bubble():
    """Stages of equal layers: the bubble of 1F1B beside messages that take no time is (p - 1) / m of the work."""
    config = _config(global_batch=32, micro_batch=1)
    config = dataclasses.replace(config, mesh=MeshSection(pp=2), model=dataclasses.replace(config.model, num_layers=8))
    times = {}
    for name in ("1f1b", "gpipe", "zb_h1"):
        mesh = dataclasses.replace(config.mesh, schedule=name)
        plan = make_plan(dataclasses.replace(config, mesh=mesh), 2, facts=None)
        times[name] = step_time(config, plan, Rates(device=H200, gpus_per_node=8, network=1e9))
    time = times["1f1b"]
    work = time.products + time.attention + time.memory + time.idle
    assert 0 < time.bubble < 1.5 * work / plan.num_microbatches
    assert times["zb_h1"].bubble < 0.7 * time.bubble and times["gpipe"].bubble == pytest.approx(time.bubble, rel=0.2)
    slow = step_time(config, plan, Rates(device=H200, gpus_per_node=1, network=1e6))
    assert slow.bubble > times["zb_h1"].bubble, "a link that is slow"


@pytest.mark.parametrize("count", [8, 16, 19, 40])
def test_a_long_step_is_extended_from_shorter_ones(count):
    from trainer.pipeline.simulate import Costs, simulate

    config = dataclasses.replace(_config(global_batch=64), mesh=MeshSection(pp=4))
    layout = make_plan(
        dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=8)), 4, facts=None
    ).pipeline
    costs = Costs(forward=(1, 2, 1, 1.5), inputs=(1, 2, 1, 1), weights=(1, 1, 1, 1), transfer=0.25)
    assert layout.step_seconds(count, costs) == pytest.approx(simulate(layout.lowered(count), costs).step)


def test_problems_of_every_layout_are_not_those_of_a_mesh():
    hardware, config = _hardware(4), _config()
    assert problems_of_every_layout(dataclasses.replace(config, mesh=MeshSection(tp=3)), hardware, facts=None) == []
    broken = dataclasses.replace(config, run=dataclasses.replace(config.run, folder=""))
    (problem,) = problems_of_every_layout(broken, hardware, facts=None)
    assert problem.startswith("run.folder is empty")


@pytest.mark.parametrize("name", ["mamba2-1.3b", "nemotron-h-8b", "llama3.2-1b"])
def test_over_cp_mixers_gather_states_of_rows_and_attention_keys_of_tokens(name):
    """A state for each token made two ranks along cp 28 times slower than one."""
    tables = {
        "run": {"folder": "r", "deterministic": True},  # otherwise keys travel while a chunk attends to its own
        "model": {"preset": name, "vocab_size": 50304},
        "data": {"blend": "mock"},
        "mesh": {"cp": 2},
        "train": {"sequence_length": 8192, "global_batch": 2, "micro_batch": 1, "steps": 1},
        "optimizer": {"lr": 1e-3},
        "precision": {"dtype": "bf16"},
    }
    config, problems = parse_config(tables)
    assert config is not None, problems
    time = step_time(config, make_plan(config, 2), Rates(device=H200, gpus_per_node=8))
    assert 0 < time.context_parallel < 0.1 * time.products
    beside = dataclasses.replace(config, run=dataclasses.replace(config.run, deterministic=False))
    hidden = step_time(beside, make_plan(beside, 2), Rates(device=H200, gpus_per_node=8)).context_parallel
    assert hidden < time.context_parallel or "mamba" in name
