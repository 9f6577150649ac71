"""data.blend = "mock": whole runs without data files, in every layout and resumed; conflicting settings refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest

import mdata
from cli.mtrain import main
from tests.helpers.ranks import RankError, run_ranks
from trainer.config.parse import dump_config
from trainer.config.sections import (
    CheckpointSection,
    DataSection,
    MeshSection,
    ModelSection,
    MoESection,
    OptimizerSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from trainer.optim.data_parallel import GradientReducer
from trainer.parallel.mesh import Mesh
from trainer.parallel.world import join_world
from trainer.plan.check import check
from trainer.report.data import read_corpora, read_run
from trainer.run.data import open_data
from trainer.run.metrics import read_metrics
from trainer.run.train import train

VOCAB = 100


def config_of(folder, *, tp=1, sequence_parallel=False, steps=6, interval=None, vocab_size=VOCAB, **data) -> RunConfig:
    return RunConfig(
        run=RunSection(folder=str(folder), seed=7),
        model=ModelSection(num_layers=2, hidden_size=32, num_heads=4, vocab_size=vocab_size),
        data=DataSection(blend="mock", **data),
        mesh=MeshSection(tp=tp, sequence_parallel=sequence_parallel),
        train=TrainSection(sequence_length=32, global_batch=4, micro_batch=2, steps=steps, eval_interval=3),
        optimizer=OptimizerSection(lr=1e-3, decay_steps=6),
        checkpoint=CheckpointSection(interval=interval),
    )


def _train(context, config):
    train(config, context.join(Mesh(context.world, config.mesh.tp)))


def _curve(config, ranks=1):
    run_ranks(_train, ranks, config)
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in read_metrics(Path(config.run.folder))}


def test_layouts_have_the_same_losses(tmp_path):
    alone = _curve(config_of(tmp_path / "alone"))
    assert list(alone) == [1, 2, 3, 4, 5, 6]
    assert all(loss == pytest.approx(math.log(VOCAB), rel=0.05) for loss, _ in alone.values())
    for name, tp, sequence_parallel in (("tp", 2, False), ("sp", 2, True), ("dp", 1, False)):
        other = _curve(config_of(tmp_path / name, tp=tp, sequence_parallel=sequence_parallel), 2)
        for step, expected in alone.items():
            assert other[step] == pytest.approx(expected, rel=1e-4), (name, step)


def test_a_run_continues_bitwise(tmp_path):
    whole = _curve(config_of(tmp_path / "whole"))
    _curve(config_of(tmp_path / "parts", steps=3))
    assert _curve(config_of(tmp_path / "parts")) == whole
    with pytest.raises(RankError, match=r"run\.seed=8"):
        other = config_of(tmp_path / "parts", steps=7)
        run_ranks(_train, 1, replace(other, run=replace(other.run, seed=8)))


@pytest.mark.parametrize(("count_skipped", "behind"), [(True, 1), (False, 1), (False, 0)])
def test_schedules_count_skipped_steps_or_stand_still(count_skipped, behind, tmp_path, monkeypatch):
    """A run of one rank in this process; `behind`: as on a GPU the report of a step is read during the next."""
    monkeypatch.setattr("trainer.run.train.reports_behind", lambda device: behind)
    overflowing, finish, steps = (1, 2, 5), GradientReducer.finish, itertools.count(1)

    def finished(reducer):
        finish(reducer)
        if next(steps) in overflowing:
            reducer.buffers.gradients.values[0] = math.inf

    monkeypatch.setattr(GradientReducer, "finish", finished)
    optimizer = OptimizerSection(lr=1e-3, schedule="linear", decay_samples=48, count_skipped=count_skipped)

    def lines(folder, *lengths):
        nonlocal steps
        steps = itertools.count(1)
        for length in lengths:
            train(replace(config_of(folder, steps=length), optimizer=optimizer), join_world(Mesh(1)))
        return read_metrics(folder)

    whole, counted = lines(tmp_path / "whole", 8), 0
    for line in whole:
        assert line["lr"] == pytest.approx(1e-3 * (1 - counted / 12))
        counted += line["step"] not in overflowing or count_skipped
    parts = lines(tmp_path / "parts", 6, 8)
    assert [(line["loss"], line["lr"]) for line in parts] == [(line["loss"], line["lr"]) for line in whole]


def test_it_needs_a_vocabulary_and_nothing_of_files(tmp_path):
    bare = config_of(tmp_path, vocab_size=None)
    (problem,) = check(bare, 1, facts=open_data(bare).facts)
    assert problem.startswith('data.blend="mock" has no tokenizer, so it needs model.vocab_size')
    for kind, size in itertools.product(("bert", "t5"), (None, 5)):
        small = config_of(tmp_path, vocab_size=size, kind=kind)
        assert any("model.vocab_size" in line for line in check(small, 1, facts=open_data(small).facts))
    wrong = {
        "split": "90,10",
        "valid": ("held.json",),
        "order": "megatron",
        "longer": "drop",
        "shuffle_block": 8,
        "document_masks": True,
        "cache": "kept",
    }
    problems = check(config_of(tmp_path, **wrong, kind="packed"), 1, facts=None)
    assert not any("document_masks" in line for line in problems)
    problems = [line for line in check(config_of(tmp_path, **wrong), 1, facts=None) if "applies only" not in line]
    assert [line.partition("=")[0] for line in problems] == [
        f"data.{name}" for name in ("split", "valid", "order", "document_masks", "shuffle_block", "cache")
    ]
    assert problems[1] == (
        'data.valid=["held.json"] does not apply to data.blend="mock", which reads no file; leave it out'
    )
    assert check(config_of(tmp_path, prefetch=5), 1, facts=open_data(config_of(tmp_path)).facts) == []


def test_commands_know_it(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(dump_config(config_of(tmp_path / "run")))
    assert main(["check", str(path)]) == 0
    assert main(["plan", str(path)]) == 0
    assert "vocabulary" in capsys.readouterr().out
    run_ranks(_train, 1, config_of(tmp_path / "run"))
    (note,) = read_corpora(read_run(tmp_path / "run")).notes
    assert note.startswith("The run was trained on mock data")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "trained on mock data" in (tmp_path / "run" / "report.html").read_text()
    with pytest.raises(mdata.UsageError, match="mock data: its tokens come from no document"):
        mdata.trace_run(tmp_path / "run")
    assert main(["generate", str(tmp_path / "run"), "--prompt", "a"]) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_experts_are_trained_measured_reported_and_resumed(tmp_path, capsys):
    """With everything that a run has: bias, balance, evaluation, a checkpoint, the plan, the report."""
    experts = MoESection(
        num_experts=4,
        top_k=2,
        ffn_hidden_size=16,
        layers=(0, 1),
        score="sigmoid",
        expert_bias=True,
        capacity_factor=1.0,
    )
    config = config_of(tmp_path / "whole", steps=4, interval=2)
    config = replace(config, model=replace(config.model, moe=experts))
    world = join_world(Mesh(1, 1))
    train(config, world)
    lines = read_metrics(tmp_path / "whole")
    for line in lines:
        (layer,) = line["experts"].values()
        assert set(line["experts"]) == {"1"} and set(line["named_losses"]) == {"balance_1"}
        slots = 4 * 32 * 2
        assert sum(layer["load"]) == pytest.approx(slots * (1 - layer["dropped"])) and 0 < layer["dropped"] < 0.5
        assert max(layer["load"]) / (sum(layer["load"]) / 4) == pytest.approx(layer["max"])
        assert 0 <= layer["min"] <= 1 <= layer["max"] <= 4 and 0 < layer["entropy"] <= math.log(4) + 1e-9
    half = replace(config, run=replace(config.run, folder=str(tmp_path / "half")))
    train(replace(half, train=replace(half.train, exit_interval=2)), world)
    train(half, world)
    keys = ("loss", "grad_norm", "experts")
    resumed = read_metrics(tmp_path / "half")
    assert [[line[key] for key in keys] for line in resumed] == [[line[key] for key in keys] for line in lines]
    (tmp_path / "run.toml").write_text(dump_config(config))
    assert main(["plan", str(tmp_path / "run.toml")]) == 0
    text = capsys.readouterr().out
    assert "active for a token" in text
    assert main(["report", str(tmp_path / "whole")]) == 0
    page = (tmp_path / "whole" / "report.html").read_text()
    assert "<h2>Experts</h2>" in page and "busiest" in page


def _train_over_experts(context, config):
    train(config, context.join(Mesh(context.world, ep=config.mesh.ep)))


def test_a_step_whose_tokens_do_not_fit_in_the_buffers_of_experts_ends_the_run(tmp_path):
    config = config_of(tmp_path / "small", steps=2, interval=2)
    model = replace(config.model, moe=MoESection(num_experts=4, top_k=1, ffn_hidden_size=16))
    mesh = MeshSection(ep=2, expert_dispatch="all_to_all", expert_buffer=1.0)
    config = replace(config, model=model, mesh=mesh)
    message = (
        r"step 1 changed nothing: the experts of a rank had more [\s\S]* times an even load, mesh.expert_buffer=1\n"
    )
    with pytest.raises(RankError, match=message):
        run_ranks(_train_over_experts, 2, config)
    run = replace(config.run, folder=str(tmp_path / "large"))
    run_ranks(_train_over_experts, 2, replace(config, run=run, mesh=replace(mesh, expert_buffer=2.0)))
    assert all(math.isfinite(line["loss"]) for line in read_metrics(tmp_path / "large"))
