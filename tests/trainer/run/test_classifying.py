"""Runs of a classifier: accuracy of every row in each layout, predictions, the best checkpoint, and going on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mdata.sources.labelled import LABELS
from mdata.tracing.run_folder import trace_run
from tests.helpers.labelled import make_labelled
from tests.helpers.ranks import run_ranks
from tests.trainer.run.one_rank import alone, curve
from trainer.config.parse import dump_config
from trainer.config.sections import (
    BertSection,
    CheckpointSection,
    DataSection,
    MeshSection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from trainer.parallel.mesh import Mesh
from trainer.run.metrics import read_metrics
from trainer.run.train import train

SETS = ("dev_a", "dev_b")
ROWS = {"train": 100, "dev_a": 23, "dev_b": 10}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_labelled(tmp_path_factory.mktemp("rows"), ROWS)


def config_of(data, folder, *, steps, interval=None, batch=24, **mesh):
    bert = BertSection(task="classify", labels=LABELS["mnli"])
    size = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "max_position": 32}
    return RunConfig(
        run=RunSection(folder=str(folder), seed=7),
        model=ModelSection(family="bert", bert=bert, activation="gelu_erf", bias=True, norm="layernorm", **size),
        data=DataSection(
            blend=str(data["train"]), kind="classify", valid=tuple(str(data[name]) for name in data if name != "train")
        ),
        train=TrainSection(
            sequence_length=24,
            global_batch=batch,
            micro_batch=4,
            steps=steps,
            eval_interval=interval or steps,
            eval_samples=0,
        ),
        optimizer=OptimizerSection(lr=3e-3, warmup_steps=3),
        precision=PrecisionSection(dtype="fp32"),
        checkpoint=CheckpointSection(interval=interval, keep=1, keep_best=1 if interval else 0),
        mesh=MeshSection(**mesh),
    )


def predictions(folder, step):
    lines = {name: (Path(folder) / f"predictions/step-{step}/{name}.jsonl").read_text().splitlines() for name in SETS}
    return {name: [json.loads(line) for line in of_set] for name, of_set in lines.items()}


def _run(context, config):
    train(config, context.join(Mesh(context.world, config.mesh.tp)))


@pytest.fixture(scope="module")
def one(data, tmp_path_factory):
    """Two epochs' evaluations of one rank: 4 steps."""
    config = config_of(data, tmp_path_factory.mktemp("one"), steps=4, interval=2)
    alone(config)
    return config


def test_every_row_is_predicted_once_and_counted(one):
    last = read_metrics(Path(one.run.folder))[-1]
    found = predictions(one.run.folder, 4)
    right = {name: [line["label"] == line["gold"] for line in lines] for name, lines in found.items()}
    assert {name: len(lines) for name, lines in right.items()} == {name: ROWS[name] for name in SETS}
    assert [line["uid"] for line in found["dev_a"]] == [str(number) for number in range(ROWS["dev_a"])]
    both = [*right["dev_a"], *right["dev_b"]]
    expected = {name: sum(of_set) / len(of_set) for name, of_set in right.items()} | {"overall": sum(both) / len(both)}
    assert last["accuracy"] == pytest.approx(expected)
    assert sum(found["dev_b"][0]["probabilities"].values()) == pytest.approx(1, abs=1e-5)
    assert set(last["valid"]) == set(SETS)


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [(3, {}), pytest.param(2, {}, marks=pytest.mark.soak), pytest.param(2, {"tp": 2}, marks=pytest.mark.soak)],
)
def test_accuracy_is_that_of_one_rank(one, data, tmp_path, ranks, mesh):
    config = config_of(data, tmp_path / "run", steps=4, interval=2, **mesh)
    run_ranks(_run, ranks, config)
    mine, theirs = (predictions(folder, 4) for folder in (config.run.folder, one.run.folder))
    for name in SETS:
        assert [line["label"] for line in mine[name]] == [line["label"] for line in theirs[name]]
        for a, b in zip(mine[name], theirs[name], strict=True):
            assert a["probabilities"] == pytest.approx(b["probabilities"], abs=1e-4)
    accuracies = [read_metrics(Path(folder))[-1]["accuracy"] for folder in (config.run.folder, one.run.folder)]
    assert accuracies[0] == accuracies[1]


def test_a_run_goes_on_within_an_epoch(one, data, tmp_path):
    config = config_of(data, tmp_path / "run", steps=4, interval=2)
    alone(replace(config, train=replace(config.train, exit_interval=3)))
    assert len(curve(config)) == 3
    alone(config)
    assert curve(config) == curve(one), "to the bit"
    assert predictions(config.run.folder, 4) == predictions(one.run.folder, 4)
    traced = trace_run(config.run.folder).row(4, 1)
    assert traced.parts and traced.place.step == 4


def test_the_checkpoint_with_the_highest_accuracy_stays(data, tmp_path):
    config = config_of(data, tmp_path / "run", steps=3, interval=1)
    config = replace(config, optimizer=OptimizerSection(lr=1e-9, weight_decay=0.0))  # nothing is learned: all are equal
    alone(config)
    accuracies = [line["accuracy"]["overall"] for line in read_metrics(tmp_path / "run")]
    assert len(accuracies) == 3 and len(set(accuracies)) == 1
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("step-*"))
    assert kept == ["step-1", "step-3"], "the first of the best, and the newest"


# ---- long


@pytest.mark.soak
def test_kill_9_within_an_epoch_and_run_again(one, data, tmp_path):
    config = config_of(data, tmp_path / "run", steps=4, interval=2)
    config = replace(config, checkpoint=replace(config.checkpoint, interval=1, keep=2))
    path = tmp_path / "run.toml"
    path.write_text(dump_config(config))
    command = [sys.executable, "-m", "cli.mtrain", "train", str(path)]
    for lines in (1, 3):
        process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
        metrics = tmp_path / "run/metrics.jsonl"
        while process.poll() is None and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= lines):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert curve(config) == curve(one)
    assert predictions(config.run.folder, 4) == predictions(one.run.folder, 4)


@pytest.mark.soak
@pytest.mark.parametrize(("noise", "epoch"), [(0.0, 50), (0.2, 200)])
def test_rows_of_a_known_bayes_rate(tmp_path, noise, epoch):
    """Two epochs: all of the dev set is right, or as much of it as its noise leaves."""
    rows = {"train": 16 * epoch, "dev_a": 400}
    data = make_labelled(tmp_path, rows, noise=noise)
    config = config_of(data, tmp_path / "run", steps=2 * epoch, interval=epoch, batch=16)
    config = replace(config, train=replace(config.train, micro_batch=16))
    alone(config)
    accuracy = read_metrics(tmp_path / "run")[-1]["accuracy"]["dev_a"]
    sigma = (noise * (1 - noise) / rows["dev_a"]) ** 0.5
    assert abs(accuracy - (1 - noise)) <= 2 * sigma
