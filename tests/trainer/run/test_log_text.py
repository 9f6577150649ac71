"""The log without a terminal: the run, its progress, and every evaluation, checkpoint and skipped step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from cli.mtrain import main
from mdata.errors import counted
from tests.helpers.runs import make_corpora, write_jsonl
from tests.trainer.plan.test_plan import FACTS
from tests.trainer.plan.test_plan import config as sound
from trainer.config.parse import dump_config, parse_config
from trainer.plan.plan import make_plan
from trainer.run.engine import Engine
from trainer.run.log_text import (
    device_text,
    duration_text,
    event_text,
    header,
    losses_text,
    short_count,
    step_text,
)
from trainer.run.metrics import MetricsWriter, read_metrics
from trainer.run.resume import Done, Start


def test_the_header_of_many_ranks_that_go_on():
    config = sound(mesh={"sequence_parallel": True}, train={"steps": 2000, "global_batch": 1024})
    plan = make_plan(config, 8, facts=FACTS)
    start = Start(
        done=Done(400, 3200), folder=Path("run/checkpoints/step-400"), config=config, changes={}, notes=("changed: x",)
    )
    assert list(header(config, plan, start=start, device="cuda:0 (NVIDIA H200)")) == [
        f"{plan.num_parameters:,} parameters in fp32 on 8 ranks (tp 2 x dp 4, sequence parallel), cuda:0 (NVIDIA H200)",
        "steps 401 to 2,000 of 1,024 samples x 32 tokens, in 128 microbatches of 2 per rank; "
        "resumed from run/checkpoints/step-400",
        "changed: x",
    ]


def test_the_header_of_a_new_run_on_one_rank():
    config = sound(mesh={"tp": 1})
    start = Start(done=Done(0, 0), folder=None, config=config, changes={}, notes=())
    first, second = header(config, make_plan(config, 1, facts=FACTS), start=start, device="cpu")
    assert first.endswith("parameters in fp32 on 1 rank, cpu")
    assert second.startswith("steps 1 to 100 of 8 samples") and second.endswith("new weights from seed 1234")
    whole = sound(mesh={"tp": 1}, train={"micro_batch": 8})
    _, second = header(whole, make_plan(whole, 1, facts=FACTS), start=start, device="cpu")
    assert ", in 1 microbatch of 8 per rank; " in second
    assert device_text(torch.device("cpu")) == f"cpu with {counted(torch.get_num_threads(), 'thread')}"


def test_what_is_written_down_is_said(tmp_path):
    said: list[str] = []
    with MetricsWriter(tmp_path, tell=said.append) as log:
        log.step(1, {"loss": 2.0})
        log.step(1000, {"loss": 2.0, "valid": {"a": 1.5, "b": 2.25}, "test": {"c": 3.0}})
        log.event("start", {"step": 0})
        log.event("saved", {"step": 1000, "checkpoint": "step-1000", "seconds": 1.234})
        log.event("skipped", {"step": 1001, "loss": float("nan"), "grad_norm": float("inf")})
    assert said == [
        "step 1,000: validation loss a 1.5000, b 2.2500",
        "step 1,000: test loss c 3.0000",
        "step 1,000: checkpoint step-1000 written in 1.2 s",
        "step 1,001: skipped, gradient norm inf, loss nan",
    ]
    assert list(losses_text(1, {"loss": 1.0, "valid": {}})) == []
    assert event_text("something of tomorrow", {}) is None


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    made = make_corpora(folder, {name: write_jsonl(folder / f"{name}.jsonl", n) for n, name in enumerate("ab")})
    tables = {
        "run": {"folder": str(folder / "run")},
        "model": {"num_layers": 1, "hidden_size": 16, "num_heads": 2},
        "data": {"blend": str(made["a"]), "valid": [str(made["b"])]},
        "train": {"sequence_length": 16, "global_batch": 4, "micro_batch": 2, "steps": 4, "eval_interval": 2},
        "optimizer": {"lr": 1e-2},
        "checkpoint": {"interval": 3},
    }
    config, problems = parse_config(tables)
    assert config is not None, problems
    (folder / "run.toml").write_text(dump_config(config))
    return folder / "run.toml"


def test_the_log_of_a_run_without_a_terminal(run_file, monkeypatch, capsys):
    """Each thing that a reader of a Slurm log looks for, in the order in which it happens."""
    real = Engine.step

    def first(self, *arguments, **options):
        self.buffers.gradients.values[0] = float("nan")
        monkeypatch.setattr(Engine, "step", real)
        return real(self, *arguments, **options)

    monkeypatch.setattr(Engine, "step", first)
    assert main(["train", str(run_file), "--nproc", "1"]) == 0
    lines = capsys.readouterr().err.splitlines()
    notes = [line.removeprefix("mtrain: ") for line in lines if line.startswith("mtrain: ")]
    metrics = {line["step"]: line for line in read_metrics(run_file.parent / "run")}
    assert "parameters in fp32 on 1 rank, cpu" in notes[0]
    assert notes[1] == (
        "steps 1 to 4 of 4 samples x 16 tokens, in 2 microbatches of 2 per rank; new weights from seed 1234"
    )
    assert notes[2].startswith("step 1: skipped, gradient norm nan")
    assert f"step 2: validation loss b {metrics[2]['valid']['b']:.4f}" in notes
    assert [note.split(" written")[0] for note in notes if "checkpoint" in note] == [
        "step 3: checkpoint step-3",
        "step 4: checkpoint step-4",
    ]
    steps = [line for line in lines if not line.startswith("mtrain: ")]
    assert [line.split(" | ")[0] for line in steps] == ["step 1/4", "step 2/4", "step 3/4", "step 4/4"]
    for line, told in zip(steps, metrics.values(), strict=True):
        assert f" | loss {told['loss']:.4f} | " in line and f" | {64 * told['step']} tokens | " in line
        assert told["mfu"] is None and " MFU " not in line and "TFLOP/s/rank" in line
        assert told["weight_decay"] == 0.1 and told["step_time_s"] > 0
        assert told["consumed_tokens"] == 16 * told["consumed_samples"]
    # What is told of a step's evaluation and checkpoint follows its own numbers.
    for step in (2, 3, 4):
        told_later = [i for i, line in enumerate(lines) if line.startswith(f"mtrain: step {step}: ")]
        assert told_later and lines.index(steps[step - 1]) < min(told_later), step
    assert main(["train", str(run_file), "--nproc", "1", "train.steps=5", "optimizer.decay_steps=5"]) == 0
    again = capsys.readouterr().err
    assert "mtrain: steps 5 to 5 of 4 samples x 16 tokens" in again
    assert f"resumed from {run_file.parent}/run/checkpoints/step-4\n" in again
    assert "mtrain: changed since step-4: train.steps 4 -> 5, optimizer.decay_steps 4 -> 5\n" in again


def test_the_log_as_json_obeys_the_interval(run_file, tmp_path, capsys):
    settings = [f"run.folder={tmp_path}", "run.log_format=json", "train.log_interval=3", "train.eval_interval=none"]
    assert main(["train", str(run_file), "--nproc", "1", *settings]) == 0
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "train.log_interval is now run.log_interval; the old name works until 0.2"
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if "step" in record]
    assert [(record["step"], record["steps"]) for record in steps] == [(3, 4), (4, 4)]
    assert [record["step"] for record in read_metrics(tmp_path)] == [3, 4]
    assert steps[0]["loss"] == read_metrics(tmp_path)[0]["loss"] and steps[0]["eta_s"] >= 0
    notes = [record["note"] for record in records if "step" not in record]
    assert any(note.startswith("step 4: checkpoint step-4 written") for note in notes)


def test_a_line_of_a_step_is_as_people_know_it():
    values = {
        "step": 1200,
        "steps": 50000,
        "device": "cuda",
        "step_time_s": 0.5123,
        "tflops": 412.3,
        "mfu": 0.4161,
        "loss": 2.34118,
        "lr": 2.9e-4,
        "grad_norm": 0.834,
        "consumed_tokens": 1_230_000_000,
        "memory_bytes": 18_210_000_000,
        "data_wait": 0.001,
    }
    assert step_text(values, eta_s=3 * 3600 + 12 * 60) == (
        "step 1200/50000 | 512.3 ms | 412 TFLOP/s/GPU | MFU 41.6 % | loss 2.3412 | lr 2.9e-4 | grad norm 0.834 | "
        "1.23 B tokens | 18.2 GB | ETA 3 h 12 min"
    )
    unknown = {"step": 1, "steps": 2, "loss": None, "mfu": None, "lr": 0.0, "data_wait": 0.25, "num_zeros": 1234}
    assert step_text(unknown) == "step 1/2 | lr 0 | zeros 1,234 | data wait 25%"


@pytest.mark.parametrize(
    ("count", "text"),
    [(12, "12"), (1000, "1.00 k"), (12_345_678, "12.3 M"), (999 * 10**9, "999 B"), (10**12, "1.00 T")],
)
def test_counts_are_short(count, text):
    assert short_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (61, "1 min"), (3600, "1 h 0 min"), (47 * 3600, "47 h 0 min"), (200_000, "2 d 7 h")],
)
def test_durations_are_short(seconds, text):
    assert duration_text(seconds) == text
