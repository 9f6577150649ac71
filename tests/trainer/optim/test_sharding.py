"""What data-parallel ranks divide, and when they communicate, does not change the function.

Gradients of every `optimizer.sharding` on every kind of layout against one rank (the numerics policy of
tests/trainer/run/test_parallel.py), with one bucket per block; bits of weights with communication overlapped or not,
late or early; memory filled with NaN where nothing was written yet; what a rank keeps between steps.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.helpers.examples import SOAK, soaked
from tests.helpers.ranks import run_ranks
from tests.trainer.engines import (
    assemble,
    check_same_gradients,
    held_state,
    layouts,
    logical,
    microbatches,
    save_engine,
    small_config,
    whole_gradients,
    with_documents,
)
from trainer.checkpoint.folder import read_index
from trainer.checkpoint.format import RunState
from trainer.config.sections import PrecisionSection, RunConfig
from trainer.optim import buffers, data_parallel
from trainer.parallel import collectives
from trainer.parallel.collectives import Pending
from trainer.parallel.mesh import mesh_of
from trainer.plan.memory import in_use_bytes, kept_bytes, tables
from trainer.plan.plan import make_plan
from trainer.run.engine import Engine
from trainer.run.metrics import held_parameters

SHARDINGS = ("none", "state", "gradients", "parameters")


def _config(shape: str, /, *, dtype: str = "fp64", **options: Any) -> RunConfig:
    """A run whose buckets are blocks; options are those of mesh, recompute, optimizer, model and train."""
    config = small_config(shape, dtype=dtype)
    sections: dict[str, dict[str, Any]] = {"optimizer": {"bucket_size": 1}}
    homes = {"recompute": "mode", "layers": "num_layers", "tied": "tie_embeddings", "dropout": "hidden_dropout"}
    for key, value in options.items():
        field = homes.get(key, key)
        for section in ("mesh", "optimizer", "model", "train", "recompute"):
            if field in type(getattr(config, section)).__dataclass_fields__ and (section, key) != (
                "recompute",
                "layers",
            ):
                sections.setdefault(section, {})[field] = value
                break
    changed = {section: replace(getattr(config, section), **fields) for section, fields in sections.items()}
    return replace(config, **changed)


# name -> (ranks, shape, options)
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "dp 4": (4, "gpt2", {}),
    "dp 2, two microbatches, recomputed by twos": (2, "gpt2", {"recompute": "full", "layers": 4, "chunk": 2}),
    "tp 2 sp, dp 2, norms recomputed": (4, "gpt2", {"tp": 2, "sequence_parallel": True, "recompute": "selective"}),
    "cp 2, dp 2": (4, "llama", {"cp": 2, "recompute": "full"}),
    "tied, dropout, dp 2": (2, "llama", {"tied": True, "dropout": 0.2}),
    "1f1b, tied": (4, "gpt2", {"pp": 2, "layers": 3}),
    "gpipe": (4, "llama", {"pp": 2, "schedule": "gpipe"}),
    "interleaved": (4, "llama", {"pp": 2, "schedule": "interleaved", "layers": 4}),
    "zb_h1, tied": (4, "gpt2", {"pp": 2, "schedule": "zb_h1"}),
    "zb_v, tied, recomputed": (4, "gpt2", {"pp": 2, "schedule": "zb_v", "layers": 5, "recompute": "full"}),
}


def _layout(case: str, sharding: str, **options: Any) -> tuple[int, RunConfig]:
    ranks, name, given = LAYOUTS[case]
    given = dict(given)
    chunk = given.pop("chunk", 1)
    config = _config(name, sharding=sharding, **given, **options)
    return ranks, replace(config, recompute=replace(config.recompute, layers=chunk))


# Those of "state" are what most other tests have.
FORMS = [(case, sharding) for case in LAYOUTS for sharding in ("gradients", "parameters")]
FORMS += [(case, "none") for case in ("cp 2, dp 2", "1f1b, tied", "zb_v, tied, recomputed")]


@pytest.mark.parametrize(("case", "sharding"), soaked(FORMS, but=[FORMS[0], *FORMS[3:-3:4], FORMS[-1]]))
def test_gradients_equal_those_of_one_rank(case, sharding):
    ranks, config = _layout(case, sharding)
    expected_totals, expected_loss, expected = whole_gradients(_alone(case), 1)
    totals, evaluated, got = whole_gradients(config, ranks)
    np.testing.assert_allclose(totals, expected_totals, rtol=1e-12)
    np.testing.assert_allclose(evaluated, expected_loss, rtol=1e-12)
    check_same_gradients(got, expected)


def _alone(case: str) -> RunConfig:
    """The same model on one rank."""
    _, name, given = LAYOUTS[case]
    return _config(name, **{key: given[key] for key in ("layers", "tied", "dropout") if key in given})


def _late(patch: pytest.MonkeyPatch, seed: int) -> None:
    """From here on, this rank comes late to some collectives and messages, and learns late of their end."""
    chance = random.Random(seed)

    def pause() -> None:
        if chance.random() < 0.3:
            time.sleep(chance.random() * 0.004)

    def late(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            pause()
            return real(*args, **options)

        return call

    for name in ("all_to_all_single", "all_reduce", "isend", "irecv", "all_gather_object"):
        patch.setattr(dist, name, late(getattr(dist, name)))
    patch.setattr(collectives.Pending, "wait", late(collectives.Pending.wait))


def _train(context: Any, config: RunConfig, seed: int | None, documents: bool = False) -> Any:
    """(losses and norms, evaluations with gathers on their way, weights after three steps, the model's parameters)."""
    with pytest.MonkeyPatch.context() as patch:
        if seed is not None:
            _late(patch, seed + context.rank)
        engine = layouts(context, config)
        losses, evaluated = [], []
        for step in range(3):
            batches = microbatches(engine, step)
            batches = with_documents(batches) if documents else batches
            report = engine.step(batches, 1e-2).read()
            losses.append((report.loss, report.grad_norm, report.applied))
            evaluated.append(engine.evaluate(batches))
        engine.optimizer.gathers.whole()
        parameters = {name: parameter.detach().double().numpy() for name, parameter in engine.model.named_parameters()}
        return losses, evaluated, logical(engine.optimizer.owned, engine.optimizer.state["weight"]), parameters


def _same_bits(results: Any, others: Any) -> None:
    for (losses, evaluated, parts, parameters), found in zip(results, others, strict=True):
        assert (losses, evaluated) == found[:2] and len(set(losses)) == 3
        for (name, where, values), (_, at, other) in zip(parts, found[2], strict=True):
            assert where == at
            np.testing.assert_array_equal(values, other, err_msg=name)
        for name, values in parameters.items():
            np.testing.assert_array_equal(values, found[3][name], err_msg=name)


BITS = {
    "dp 2": (2, "gpt2", {"tied": True, "recompute": "full"}),
    "tp 2, dp 2": (4, "llama", {"tp": 2, "sequence_parallel": True, "micro_batch": 2, "name": "muon"}),
    "1f1b": (4, "gpt2", {"pp": 2}),
    "zb_h1": (4, "llama", {"pp": 2, "schedule": "zb_h1", "recompute": "selective"}),
}
OFF = {"overlap_grad_reduce": False, "overlap_param_gather": False}


LATE = [(case, sharding) for case in BITS for sharding in ("state", "parameters")]
LATE += [("dp 2", "gradients"), ("tp 2, dp 2", "none"), ("zb_h1", "gradients")]
OFTEN_LATE = [("dp 2", "parameters"), ("tp 2, dp 2", "none"), ("1f1b", "state"), ("zb_h1", "gradients")]


@pytest.mark.parametrize(("case", "sharding"), soaked(LATE, but=OFTEN_LATE))
def test_overlap_and_delays_change_no_bit(case, sharding):
    """Communication waited for where it begins; then beside computation, with every rank late at random."""
    ranks, name, options = BITS[case]
    in_turn = run_ranks(_train, ranks, _config(name, dtype="fp32", sharding=sharding, **options, **OFF), None)
    overlapped = _config(name, dtype="fp32", sharding=sharding, **options)
    _same_bits(in_turn, run_ranks(_train, ranks, overlapped, 7))


PRECISIONS = {
    "bf16": PrecisionSection(dtype="bf16"),
    "fp16": PrecisionSection(dtype="fp16", gradients="params", initial_loss_scale=2.0**16),
    "fp8": PrecisionSection(dtype="bf16", fp8="delayed"),
}


@pytest.mark.parametrize("precision", soaked(PRECISIONS, but=["fp8"]))
def test_forms_of_sharding_give_equal_bits_where_sums_have_one_order(precision):
    """With one microbatch; with several, sums over ranks and over microbatches change places."""
    runs = {
        sharding: run_ranks(
            _train, 4, replace(_config("gpt2", sharding=sharding), precision=PRECISIONS[precision]), None
        )
        for sharding in SHARDINGS
    }
    wholes = {
        sharding: assemble([part for *_, parts, _ in found for part in parts]) for sharding, found in runs.items()
    }
    for sharding, whole in wholes.items():
        assert runs[sharding][0][0] == runs["state"][0][0], sharding
        for name, values in whole.items():
            np.testing.assert_array_equal(values, wholes["state"][name], err_msg=f"{sharding} {name}")


def _over_stale_memory(context: Any, config: RunConfig, stale: float) -> Any:
    """`_train` where memory that a bucket gets, and gradients after an update, hold anything."""

    def given(flat: torch.Tensor) -> None:
        buffers.give_memory(flat)
        flat.fill_(stale)

    def taken(flat: torch.Tensor) -> None:
        flat.fill_(stale)
        buffers.take_memory(flat)

    def forget(self: buffers.Buffers, number: int | None = None) -> None:
        kept = self.gradients.values
        padding = [kept[start:stop] for bucket in self.layout.buckets for start, stop in buffers.gaps(bucket)]
        if number is None and not self.shards_gradients:
            kept.fill_(stale)
            for gap in padding:
                gap.zero_()
        real(self, number)

    real = buffers.Buffers.forget
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_parallel, "give_memory", given)
        patch.setattr(data_parallel, "take_memory", taken)
        patch.setattr(buffers.Buffers, "forget", forget)
        return _train(context, config, None)


@pytest.mark.parametrize("sharding", soaked(SHARDINGS, but=["gradients", "parameters"]))
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"recompute": "full"}, id="full", marks=pytest.mark.soak),
        pytest.param({"pp": 2, "schedule": "zb_v", "layers": 4}, id="zb_v"),
    ],
)
def test_what_memory_held_before_does_not_count(options, sharding):
    ranks, config = 2 * options.get("pp", 1), _config("gpt2", dtype="fp32", sharding=sharding, **options)
    zeros, other = (run_ranks(_over_stale_memory, ranks, config, stale) for stale in (0.0, float("nan")))
    _same_bits(zeros, other)
    assert all(np.isfinite(losses).all() for losses, *_ in other)


# dtype, gradients -> bytes of a parameter, of its gradient, of main weight and moments
BYTES = {
    ("fp32", "main"): (4, 4, 8),
    ("bf16", "main"): (2, 4, 12),
    ("bf16", "params"): (2, 2, 12),
    ("fp16", "main"): (2, 4, 12),
    ("fp16", "params"): (2, 2, 12),
}
# sharding -> which of them are divided
DIVIDED = {"none": (0, 0, 0), "state": (0, 0, 1), "gradients": (0, 1, 1), "parameters": (1, 1, 1)}


def _storages() -> dict[int, int]:
    """Bytes of every tensor's memory in this process, by its address."""
    gc.collect()
    # type, because isinstance asks lazy objects of other libraries for their class
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def _kept(context: Any, configs: list[RunConfig]) -> list[tuple[int, dict[str, Any], int]]:
    """Of each: (bytes of all tensors that two steps leave, what ranks.json says, the estimate)."""
    world, found = context.join(mesh_of(configs[0], context.world)), []
    gc.collect()
    gc.freeze()  # half a million objects of modules, which every look at all tensors would pass through
    for config in configs:
        before = _storages()
        engine = Engine(config, make_plan(config, context.world, facts=None), world=world)
        for step in range(2):
            engine.step(microbatches(engine, step), 1e-2)
        engine.optimizer.gathers.release()
        (table,) = tables(config, engine.plan)
        estimate, held = kept_bytes(config, engine.plan, table=table), 0
        for _ in range(100):
            held = sum(size for address, size in _storages().items() if address not in before)
            if held <= 1.03 * estimate:
                break
            time.sleep(0.02)  # a thread of gloo lets go of what it exchanged a moment later
        found.append((held, held_parameters(engine.optimizer, [0]), estimate))
        del engine
    return found


@pytest.mark.scaled
def test_the_bytes_that_a_rank_keeps_are_those_of_the_table():
    ranks, cases = 4, list(itertools.product(BYTES, SHARDINGS))
    cases = cases if SOAK > 1 else cases[::3]  # each precision and each form of sharding
    configs = []
    for (dtype, gradients), sharding in cases:
        config = _config("llama", dtype=dtype, sharding=sharding, bucket_size=None)
        model = replace(config.model, hidden_size=128, ffn_hidden_size=256, num_layers=4)
        precision = PrecisionSection(dtype=dtype, gradients=gradients)
        configs.append(replace(config, model=model, precision=precision))
    count = make_plan(configs[0], ranks, facts=None).parameters_per_rank
    for rank in run_ranks(_kept, ranks, configs):
        for (kind, sharding), (held, said, estimate) in zip(cases, rank, strict=True):
            each = zip(BYTES[kind], DIVIDED[sharding], strict=True)
            assert estimate == count * sum(size / ranks if divided else size for size, divided in each)
            assert estimate <= held <= 1.03 * estimate, (kind, sharding)
            assert estimate <= sum(said["kept_bytes"].values()) <= held
            assert said["owned_elements"] == said["buffer_elements"] / ranks


def _saved(context: Any, config: RunConfig, root: Path) -> Any:
    """The state after two steps, in a checkpoint written while gathers are on their way, and after two steps more."""
    engine = layouts(context, config)
    for step in range(4):
        if step == 2:
            run = {
                "step": 2,
                "consumed_samples": 8,
                "data_id": "",
                "data": {},
                "optimizer_steps": 2,
                "config": "x = 1\n",
            }
            save_engine(engine, root, run=RunState(**run))
        engine.step(microbatches(engine, step), 1e-2)
    return _state(engine)


def _continued(context: Any, config: RunConfig, folder: Path) -> Any:
    engine = layouts(context, config, fresh=False)
    engine.load(folder)
    for step in (2, 3):
        engine.step(microbatches(engine, step), 1e-2)
    return _state(engine)


def _state(engine: Engine) -> list[Any]:
    owns, state = engine.optimizer.owns, engine.optimizer.state
    return [(f"{n}/{a}", b, c) for n in state for a, b, c in logical(owns[n], state[n])]


def test_each_form_of_sharding_continues_from_a_checkpoint_of_each_other(tmp_path):
    """Of the same bits after two steps more, as each has one microbatch; under Muon."""
    config = {s: _config("gpt2", dtype="fp32", sharding=s, name="muon") for s in SHARDINGS}
    saved = {s: run_ranks(_saved, 4, config[s], tmp_path / s) for s in SHARDINGS}
    expected = assemble([part for parts in saved["none"] for part in parts])
    for writer, reader in zip(SHARDINGS, [*SHARDINGS[1:], SHARDINGS[0]], strict=True):
        index = [read_index(tmp_path / each / "step-2") for each in ("none", writer)]
        assert len({sum(file.bytes for file in one.files.values()) for one in index}) == 1, "each tensor once"
        found = run_ranks(_continued, 4, config[reader], tmp_path / writer / "step-2")
        got = assemble([part for parts in found for part in parts])
        assert got.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(got[name], values, err_msg=f"{writer} to {reader}: {name}")


def _events(context: Any, config: RunConfig) -> list[str]:
    """What the second of two steps does, in order: passes through blocks (f0, b0), sums and gathers that begin (s0, g0)
    and that are waited for (S0, G0)."""
    engine = layouts(context, config)
    events: list[str] = []
    begun: dict[int, tuple[Pending, str]] = {}
    wait = Pending.wait

    def waited(self: Pending) -> torch.Tensor:
        if id(self) in begun:
            events.append(begun.pop(id(self))[1])
        return wait(self)

    def noted(name: str, real: Any) -> Any:
        def call(first: Any, *rest: Any, **options: Any) -> Any:
            if isinstance(first, torch.Tensor):
                tensors = engine.buffers.bucket_gradients if name == "s" else engine.buffers.bucket_parameters
                number = next(i for i, flat in enumerate(tensors) if flat is first)
                events.append(f"{name}{max(engine.layout.buckets[number].blocks)}")
                pending = real(first, *rest, **options)
                begun[id(pending)] = pending, events[-1].upper()
                return pending
            events.append(f"{name}{first}")
            return real(first, *rest, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        hooks = engine.optimizer.hooks
        patch.setattr(Pending, "wait", waited)
        patch.setattr(data_parallel, "start_reduce_scatter_", noted("s", data_parallel.start_reduce_scatter_))
        patch.setattr(data_parallel, "start_sum_", noted("s", data_parallel.start_sum_))
        patch.setattr(data_parallel, "start_all_gather_", noted("g", data_parallel.start_all_gather_))
        finish = engine.optimizer.reducer.finish
        patch.setattr(engine.optimizer.reducer, "finish", lambda: (events.append("end"), finish()))
        patch.setattr(hooks, "before_forward", noted("f", hooks.before_forward))
        patch.setattr(hooks, "before_backward", noted("b", hooks.before_backward))
        engine.step(microbatches(engine, 0), 1e-2)
        events.clear()
        engine.step(microbatches(engine, 1), 1e-2)
    return events


# name -> (options, what happens); "end" is where the optimizer asks for the gradients
GATHERED = "f0 G0 f1 G1 f2 G2 f3 G3"  # each block waits for its own
LAST = "f0 f1 f2 f3 b3 s3 b2 s2 b1 s1 b0 s0 end S3 S2 S1 S0"
RETURNED = "b3 g2 {}s3 b2 g1 G2 S3 s2 b1 g0 G1 S2 s1 b0 G0 S1 s0"
ORDERS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({"sharding": "none"}, f"f0 f1 f2 f3 b3 b2 b1 b0 {LAST}"),
    "state": ({}, f"{GATHERED} b3 b2 b1 b0 {LAST} g0 g1 g2 g3"),
    "state, in turn": (
        {"overlap_grad_reduce": False},
        f"{GATHERED} b3 b2 b1 b0 f0 f1 f2 f3 b3 b2 b1 b0 end s3 S3 s2 S2 s1 S1 s0 S0 g0 g1 g2 g3",
    ),
    "state, gathered in turn": (
        {"overlap_param_gather": False},
        f"f0 f1 f2 f3 b3 b2 b1 b0 {LAST} g0 G0 g1 G1 g2 G2 g3 G3",
    ),
    "gradients": (
        {"sharding": "gradients"},
        f"{GATHERED} b3 s3 b2 S3 s2 b1 S2 s1 b0 S1 s0 "
        "f0 f1 f2 f3 b3 S0 s3 b2 S3 s2 b1 S2 s1 b0 S1 s0 end S0 g0 g1 g2 g3",
    ),
    "parameters": (
        {"sharding": "parameters"},
        f"f0 g0 g1 G0 f1 g2 G1 f2 g3 G2 f3 G3 {RETURNED.format('')} "
        f"f0 g1 f1 g2 G1 f2 g3 G2 f3 G3 {RETURNED.format('S0 ')} end S0",
    ),
    "parameters, in turn": (
        {"sharding": "parameters", "overlap_param_gather": False, "micro_batch": 2},
        "f0 g0 G0 f1 g1 G1 f2 g2 G2 f3 g3 G3 b3 s3 b2 g2 G2 S3 s2 b1 g1 G1 S2 s1 b0 g0 G0 S1 s0 end S0",
    ),
    "parameters, recomputed": (
        {"sharding": "parameters", "recompute": "full", "micro_batch": 2},
        "f0 g0 g1 G0 f1 g2 G1 f2 g3 G2 f3 G3 b3 g2 s3 b2 g1 G2 f2 S3 s2 b1 g0 G1 f1 S2 s1 b0 G0 S1 s0 end S0",
    ),
}


@pytest.mark.parametrize("case", ORDERS)
def test_communication_begins_at_the_borders_of_blocks_and_is_waited_for_where_it_is_needed(case):
    """Whole gradients are summed in the last backward pass, as blocks are complete, and sharded ones in each; whole
    parameters gathered after the update, in the order of use, and sharded ones a block ahead."""
    options, expected = ORDERS[case]
    for events in run_ranks(_events, 2, _config("llama", **options)):
        assert " ".join(events) == expected


@pytest.mark.parametrize("sharding", ["state", "parameters"])
def test_split_backward_passes_sum_in_their_second_half(sharding):
    config = _config("llama", sharding=sharding, pp=2, schedule="zb_h1")
    for events in run_ranks(_events, 4, config):
        sums = [number for number, event in enumerate(events) if event[0] == "s"]
        assert len(sums) == 2 * (1 if sharding == "state" else 2) and max(sums) < events.index("end"), events


def _poisoned(context: Any, config: RunConfig) -> tuple[bool, bool, bool]:
    """(whether a step with an infinite gradient in one rank's runs counted, the state was kept, the next counted)."""
    engine = layouts(context, config)
    engine.step(microbatches(engine, 0), 1e-2)
    before = held_state(engine)
    real = engine.optimizer.reducer.finish

    def poisoned() -> None:
        real()
        if context.rank == 1:
            start = next(s.start for _, s in engine.buffers.owned.segments() if not s.rules.copies)
            engine.buffers.gradients.view(start, start + 1).fill_(float("inf"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.optimizer.reducer, "finish", poisoned)
        skipped = engine.step(microbatches(engine, 1), 1e-2).read()
    kept = all(torch.equal(before[name], values) for name, values in held_state(engine).items())
    return skipped.applied, kept, engine.step(microbatches(engine, 1), 1e-2).read().applied


@pytest.mark.parametrize("sharding", soaked(SHARDINGS, but=["none", "parameters"]))
def test_what_is_infinite_in_one_ranks_runs_is_skipped_by_all(sharding):
    assert run_ranks(_poisoned, 4, _config("gpt2", sharding=sharding, tp=2)) == [(False, True, True)] * 4


def _peak(context: Any, config: RunConfig) -> tuple[int, int]:
    """(most bytes of buckets in use at a time in a step, the estimate)."""
    engine = layouts(context, config)
    used = [0, 0]

    def counted(real: Any, sign: int) -> Any:
        def call(flat: torch.Tensor) -> None:
            used[0] += sign * flat.nbytes
            used[1] = max(used)
            real(flat)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_parallel, "give_memory", counted(buffers.give_memory, 1))
        patch.setattr(data_parallel, "take_memory", counted(buffers.take_memory, -1))
        engine.step(microbatches(engine, 0), 1e-2)
        engine.optimizer.gathers.release()
    assert used[0] == 0
    table = tables(config, engine.plan)[engine.world.groups["pp"].rank]
    return used[1], in_use_bytes(config, table)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"sharding": "gradients"}),
        (2, {"sharding": "parameters", "recompute": "full"}),
        (2, {"sharding": "parameters", **OFF}),
        (4, {"sharding": "gradients", "pp": 2}),
        (4, {"sharding": "parameters", "pp": 2, "schedule": "zb_h1"}),
    ],
    ids=str,
)
def test_the_estimate_of_whole_buckets_is_what_a_step_uses(ranks, options):
    for used, estimate in run_ranks(_peak, ranks, _config("llama", dtype="bf16", layers=4, **options)):
        assert 0.7 * estimate <= used <= 1.2 * estimate, "but for padding: buckets are small here"


def _own_step(context: Any, config: RunConfig) -> Any:
    """The main weights after a step, and one of a user: all forward passes, then all backward passes."""
    engine = layouts(context, config)
    engine.step(microbatches(engine, 0), 1e-2)
    losses = []
    for batch in microbatches(engine, 1):
        logits_NV = engine.model.whole_logits(batch).flatten(0, 1)
        losses_N = torch.nn.functional.cross_entropy(logits_NV, batch.labels_BS.flatten(), reduction="none")
        losses.append((losses_N * batch.loss_mask_BS.flatten()).sum())
    for loss in losses:
        loss.backward()
    tokens = sum(batch.loss_mask_BS.sum().double() for batch in microbatches(engine, 1))
    engine.optimizer.step(1e-2, torch.stack((tokens, torch.zeros(()).double())))
    engine.step(microbatches(engine, 2), 1e-2)
    return logical(engine.optimizer.owned, engine.optimizer.state["weight"])


def test_a_step_of_a_users_own_is_the_same_under_each_form():
    wholes = {
        sharding: assemble([p for parts in run_ranks(_own_step, 2, _config("gpt2", sharding=sharding)) for p in parts])
        for sharding in SHARDINGS
    }
    (alone,) = run_ranks(_own_step, 1, _config("gpt2"))
    for sharding, whole in wholes.items():
        for name, values in assemble(alone).items():
            np.testing.assert_allclose(whole[name], values, rtol=0, atol=1e-8, err_msg=f"{sharding} {name}")
