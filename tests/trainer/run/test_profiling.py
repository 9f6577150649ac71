"""What a run measures where asked: norm of the parameters, zero gradients, and a profile of some steps."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from tests.trainer.run.one_rank import alone
from trainer.checkpoint.folder import latest_checkpoint
from trainer.config.parse import parse_config
from trainer.config.sections import RunConfig
from trainer.convert.native import open_native
from trainer.parallel.mesh import Mesh
from trainer.plan.check import check
from trainer.run.metrics import read_metrics
from trainer.run.train import train


def run_in(folder: Path, **run: object) -> RunConfig:
    config, problems = parse_config(
        {
            "run": {"folder": str(folder), **run},
            "model": {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "vocab_size": 64},
            "data": {"blend": "mock"},
            "train": {"sequence_length": 16, "global_batch": 4, "micro_batch": 2, "steps": 5},
            "optimizer": {"lr": 1e-2},
        }
    )
    assert config is not None, problems
    return config


def _train(context, config):
    train(config, context.join(Mesh(context.world, config.mesh.tp)))


@pytest.mark.slow
def test_norm_and_zeros_do_not_depend_on_the_layout(tmp_path):
    measures = {"log_params_norm": True, "log_num_zeros": True}
    alone(run_in(tmp_path / "one", **measures))
    two = run_in(tmp_path / "two", **measures)
    run_ranks(_train, 2, replace(two, mesh=replace(two.mesh, tp=2)))
    run_ranks(_train, 2, run_in(tmp_path / "dp", **measures))
    one = read_metrics(tmp_path / "one")
    for name in ("two", "dp"):
        other = read_metrics(tmp_path / name)
        assert [x["params_norm"] for x in other] == pytest.approx([x["params_norm"] for x in one], rel=1e-5)
        assert [x["num_zeros"] for x in other] == [x["num_zeros"] for x in one]
    newest = latest_checkpoint(tmp_path / "one/checkpoints")
    assert newest is not None
    source = open_native(newest).source
    names = [name for name in source.tensors if name.startswith("weight/")]
    whole = {name: ((0,) * len(shape), shape) for name in names if (shape := tuple(source.tensors[name].shape))}
    square = sum(float(source.read(name, whole[name]).double().square().sum()) for name in names)
    assert one[-1]["params_norm"] == pytest.approx(math.sqrt(square), rel=1e-6)
    plain = run_in(tmp_path / "plain")
    alone(plain)
    lines = read_metrics(tmp_path / "plain")
    assert [x["loss"] for x in lines] == [x["loss"] for x in one]
    assert not {"params_norm", "num_zeros"} & lines[0].keys()


def test_only_lines_are_measured(tmp_path):
    alone(run_in(tmp_path, log_params_norm=True, log_interval=2))
    assert [(x["step"], x["params_norm"] > 0) for x in read_metrics(tmp_path)] == [(2, True), (4, True), (5, True)]
    assert "num_zeros" not in read_metrics(tmp_path)[0]


@pytest.mark.slow
def test_a_profile_of_some_steps(tmp_path):
    alone(run_in(tmp_path, profile=[2, 3]))
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "steps-2-3-rank-0.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
    assert any(str(name).startswith("aten::") for name in names)
    alone(run_in(tmp_path / "other", profile=[5, 9], profile_ranks=[]))
    assert not (tmp_path / "other/profile").exists()


def test_what_cannot_be_profiled_is_refused(tmp_path):
    for steps in ([3], [3, 2], [0, 2], [1, 2, 3]):
        (problem,) = check(run_in(tmp_path, profile=steps), 1, facts=None)
        assert "write two steps" in problem
    (problem,) = check(run_in(tmp_path, profile=[1, 2], profile_ranks=[0, 4]), 2, facts=None)
    assert "has rank 4, but there are 2 ranks" in problem
