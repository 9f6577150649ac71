"""Rehearsed steps: equivalent ranks really are equivalent, shapes add up, and a wrong list is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.examples import soaked
from tests.trainer.engines import small_config
from trainer.config.presets import PRESETS
from trainer.config.sections import MeshSection, ModelSection, PrecisionSection, RunConfig
from trainer.optim.layout import make_layout
from trainer.parallel.matching import Matched, Mismatch
from trainer.parallel.mesh import mesh_of
from trainer.parallel.recorded import Record, recorded_world
from trainer.plan.memory import kept_bytes, rank_bytes, tables
from trainer.plan.plan import make_plan
from trainer.run import rehearsal
from trainer.run.engine import Engine
from trainer.run.metrics import held_parameters
from trainer.run.rehearsal import rehearse


def _config(preset: str = "", *, batch: int, name: str = "gpt2", muon: bool = False, **mesh: Any) -> RunConfig:
    config = small_config(name, dtype="fp32")
    model = replace(config.model, num_layers=4)
    if preset:
        model = ModelSection(**{"vocab_size": 50257, **PRESETS[preset]})
    train = replace(config.train, global_batch=batch, micro_batch=1)
    optimizer = replace(config.optimizer, name="muon" if muon else "adamw")
    precision = PrecisionSection(dtype="bf16" if preset else "fp32")
    return replace(config, model=model, train=train, mesh=MeshSection(**mesh), optimizer=optimizer, precision=precision)


SMALL = {
    "tied, sequence parallel": (8, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "interleaved, context parallel": (8, {"name": "llama", "cp": 2, "pp": 2, "schedule": "interleaved"}),
    "zb_v, four key-value copies": (8, {"name": "llama", "tp": 4, "pp": 2, "schedule": "zb_v"}),
    "data parallel": (4, {}),
    "muon": (8, {"tp": 2, "pp": 2, "muon": True, "sequence_parallel": True}),
}


@pytest.mark.parametrize("case", soaked(SMALL, but=["zb_v, four key-value copies"]))
def test_ranks_that_share_a_record_would_have_written_it(case, monkeypatch):
    """The slow twin: every rank is run by itself, every microbatch too."""
    ranks, options = SMALL[case]
    config = _config(batch=8, **options)
    plan = make_plan(config, ranks, facts=None)
    found = rehearse(config, plan)
    assert found.num_runs < ranks
    schedule, real = plan.pipeline.lowered(plan.num_microbatches), rehearsal.run_rank
    each = {rank: real(config, plan, rank=rank, schedule=schedule) for rank in range(ranks)}
    monkeypatch.setattr(rehearsal, "RUN", 1000)
    for rank in range(ranks):
        whole = real(config, plan, rank=rank, schedule=schedule)
        assert [e for e in whole.entries if e.axis != "stage"] == [e for e in each[rank].entries if e.axis != "stage"]
    numbers = iter(range(ranks))
    monkeypatch.setattr(rehearsal, "_keys", lambda *_: _Each(numbers))
    monkeypatch.setattr(rehearsal, "run_rank", lambda *_, rank, schedule: each[rank])
    assert rehearse(config, plan) == replace(found, num_runs=ranks)


class _Each(dict):  # type: ignore[type-arg]
    """Another key at each look."""

    def __init__(self, numbers: Any) -> None:
        self.numbers = numbers

    def __getitem__(self, key: Any) -> int:
        return int(next(self.numbers))


def test_gpt2_large_at_tp_2_and_pp_2():
    config = _config("gpt2-large", batch=8, tp=2, pp=2)
    plan = make_plan(config, 4, facts=None)
    found = rehearse(config, plan)
    assert plan.padded_vocab_size == 50432 and found.parameters == (210_753_280, 209_445_120)
    assert found.matched.messages == 2 * 2 * 8 and found.matched.links == 4
    for held, table in zip(found.kept_bytes, tables(config, plan), strict=True):
        assert held == pytest.approx(kept_bytes(config, plan, table=table), rel=1e-3), "padding of buckets"


@pytest.mark.parametrize("sharding", ["none", "state", "gradients", "parameters"])
@pytest.mark.parametrize(
    ("dtype", "gradients"),
    soaked([("fp32", "main"), ("bf16", "main"), ("bf16", "params"), ("fp16", "params")], but=[("bf16", "main")]),
)
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_rehearsed_rank_keeps_the_planned_bytes_and_padding(sharding, dtype, gradients, ranks):
    """With two ranks nobody shares a shard axis, so that buffers are whole whatever the sharding."""
    config = _config(batch=8, name="llama", pp=2)
    precision = PrecisionSection(dtype=dtype, gradients=gradients)
    config = replace(config, precision=precision, optimizer=replace(config.optimizer, sharding=sharding))
    plan = make_plan(config, ranks, facts=None)
    found = rehearse(config, plan)
    for rank, table in enumerate(tables(config, plan)):
        least, layout = kept_bytes(config, plan, table=table), make_layout(table, {"data": plan.dp, "edp": plan.dp})
        assert least <= found.kept_bytes[rank] <= least * layout.size / sum(spec.numel for spec in table) + 1
    planned = [kept_bytes(config, plan, table=table) for table in tables(config, plan)]
    padding = [held - least for held, least in zip(found.kept_bytes, planned, strict=True)]
    both = zip(rank_bytes(config, plan, buffer_bytes=found.kept_bytes), rank_bytes(config, plan), strict=True)
    assert [counted.total - by_table.total for counted, by_table in both] == padding


@pytest.mark.parametrize(("tp", "copies"), [(1, []), (2, ["tp"])])
def test_a_rank_names_copies_only_where_others_have_them(tp, copies):
    """What ranks.json says, of an engine without data."""
    config = _config(batch=8, tp=tp)
    plan, mesh = make_plan(config, 4, facts=None), mesh_of(config, 4)
    world = recorded_world(mesh, 0, record=Record(lambda _, value: [value] * 4))
    said = held_parameters(Engine(config, plan, world=world, fresh=False).optimizer, [0])
    found = {parameter["name"]: parameter["copies"] for parameter in said["parameters"]}
    assert found["final_norm.weight"] == copies and found["embedding.weight"] == []


@pytest.mark.soak
def test_gpt3_on_1024_ranks():
    """With two layers in each stage: more of the same say nothing about ranks."""
    config = _config("gpt3-175b", batch=256, tp=8, pp=16, sequence_parallel=True)
    config = replace(config, model=replace(config.model, num_layers=32))
    found = rehearse(config, make_plan(config, 1024, facts=None))
    # tp groups, data groups, ends, the whole world; each pipeline has 15 links in each direction.
    assert found.matched.groups == 128 + 128 + 64 + 1 and found.matched.links == 64 * 2 * 15
    assert found.matched.messages == 64 * 2 * 15 * 32 and found.num_runs == 32


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb_v"])
def test_gpt3_on_4096_ranks(schedule):
    config = _config("gpt3-175b", batch=1024, tp=8, cp=2, pp=16, schedule=schedule)
    found = rehearse(config, make_plan(config, 4096, facts=None))
    assert isinstance(found.matched, Matched) and found.matched.messages > 0


def test_a_list_of_one_rank_that_differs_is_named(monkeypatch):
    """Two microbatches change places in the last stage's list, for this rank alone."""
    config = _config(batch=16, pp=2)
    plan = make_plan(config, 4, facts=None)
    real = rehearsal.run_rank

    def crossed(*args: Any, rank: int, **options: Any) -> Any:
        program = real(*args, rank=rank, **options)
        if rank != 2:
            return program
        entries = list(program.entries)
        receives = [i for i, entry in enumerate(entries) if entry.kind == "receive"]
        a, b = receives[:2]
        entries[a], entries[b] = entries[b], entries[a]
        return replace(program, entries=tuple(entries))

    monkeypatch.setattr(rehearsal, "run_rank", crossed)
    with pytest.raises(Mismatch, match=r"rank 0 sends .*0SEND_F0.* to rank 2, which expects .*0SEND_F1"):
        rehearse(config, plan)
