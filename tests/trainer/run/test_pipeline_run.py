"""Whole runs with pipeline stages: curves, evaluation, checkpoints of other layouts, ranks.json, and lost peers."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.ranks import RankError, run_ranks
from tests.trainer.engines import layouts, microbatches, small_config
from tests.trainer.run.test_mock_run import config_of
from trainer.config.sections import MeshSection, RunConfig
from trainer.parallel.mesh import mesh_of
from trainer.run.metrics import read_metrics
from trainer.run.train import train


def _train(context: Any, config: RunConfig) -> None:
    train(config, context.join(mesh_of(config, context.world)))


def _curve(config: RunConfig, ranks: int) -> dict[int, tuple[float, float]]:
    run_ranks(_train, ranks, config)
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in read_metrics(Path(config.run.folder))}


def _config(folder: Path, **changes: Any) -> RunConfig:
    steps, mesh = changes.pop("steps", 6), MeshSection(**changes)
    config = config_of(folder, steps=steps)
    model = replace(config.model, num_layers=4)
    return replace(config, model=model, mesh=mesh, train=replace(config.train, micro_batch=1))


def test_a_run_goes_on_in_every_layout(tmp_path):
    """A tied model; from one rank to two stages, to a V of four, and back: one curve."""
    alone = _curve(_config(tmp_path / "alone"), 1)
    folder = tmp_path / "changing"
    for steps, ranks, mesh in (
        (2, 2, {"pp": 2}),
        (3, 1, {}),
        (4, 2, {"pp": 2, "schedule": "zb_v"}),
        (5, 4, {"pp": 2, "tp": 2, "schedule": "interleaved"}),
        (6, 2, {"pp": 2, "layers_per_stage": (3, 1), "schedule": "zb_h1"}),
    ):
        found = _curve(_config(folder, steps=steps, **mesh), ranks)
        assert list(found) == list(range(1, steps + 1))
    for step, expected in alone.items():
        assert found[step] == pytest.approx(expected, rel=1e-4), step
    held = json.loads((folder / "ranks.json").read_text())
    ranks = held["ranks"] if isinstance(held, dict) else held
    assert [(rank["pp"], rank["stages"]) for rank in ranks] == [(0, [0]), (1, [1])]
    names = [{p["name"] for p in rank["parameters"]} for rank in ranks]
    assert "blocks.2.mlp.up.weight" in names[0] and "blocks.3.mlp.up.weight" in names[1]
    assert names[0] & names[1] == {"embedding.weight"}


def _lost(context: Any, how: str) -> str:
    """What rank 0 is told when rank 1 ends, or hangs, in its second step."""
    config = replace(small_config("llama"), mesh=MeshSection(pp=2))
    engine = layouts(context, config)
    engine.step(microbatches(engine, 0), 1e-3).read()
    if context.rank == 1 and how == "dies":
        os._exit(3)
    if context.rank == 1:
        time.sleep(4)
        return ""
    engine.executor.wait_s = 1.0
    engine.step(microbatches(engine, 1), 1e-3)
    return "nothing happened"


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_a_lost_peer_is_named_with_the_message(how):
    with pytest.raises(RankError) as error:
        run_ranks(_lost, 2, how)
    text = str(error.value)
    if how == "hangs":
        assert "pipeline rank 0 cannot finish 0RECV_B0, a message from pipeline rank 1" in text
    else:
        assert "the process died (exit code 3)" in text
