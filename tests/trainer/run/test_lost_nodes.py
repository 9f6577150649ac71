"""A job that was started again with fewer ranks stops, waits, or goes on with a layout that keeps its batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mdata import StoppedError, UsageError
from tests.helpers.ranks import run_ranks
from tests.trainer.run.one_rank import alone, curve
from tests.trainer.run.test_end_time import run_in
from trainer.config.sections import MeshSection, RunConfig
from trainer.parallel.mesh import Mesh
from trainer.run.lost_nodes import LostNodeError, NodesAwaitedError, after_lost_node, lost_ranks, wait_for_nodes
from trainer.run.train import train

pytestmark = pytest.mark.usefixtures("one_thread")
JOB, AGAIN = {"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _on_two(context: Any, config: RunConfig, env: dict[str, str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        train(config, context.join(Mesh(context.world, 2)))


def started(folder: Path, env: dict[str, str], policy: str | None, **train_keys: int) -> RunConfig:
    """The configuration of a run that two ranks (tp 2) have begun in a job: half of its steps."""
    config = run_in(folder, on_lost_node=policy)
    config = replace(config, mesh=MeshSection(tp=2), train=replace(config.train, **train_keys))
    run_ranks(_on_two, 2, replace(config, train=replace(config.train, exit_interval=3)), env)
    return config


def test_shrinking_keeps_the_batch_and_the_curve(tmp_path):
    whole = run_in(tmp_path / "whole")
    alone(whole)
    config = started(tmp_path / "run", JOB, "shrink")
    assert lost_ranks(config, 1, env=AGAIN) == 1
    told = list[str]()
    shrunk = after_lost_node(config, 1, env=AGAIN, tell=told.append)
    assert (shrunk.mesh.tp, shrunk.train) == (1, config.train)
    assert told == [
        "1 of 2 ranks are left: the run goes on with them, with the same global batch and order; the nearest layout "
        "that works: mesh.tp=1"
    ]
    alone(shrunk)
    for (step, loss, norm), (_, wanted, wanted_norm) in zip(curve(shrunk), curve(whole), strict=True):
        assert (loss, norm) == pytest.approx((wanted, wanted_norm), rel=1e-4), step
    # The first start of a job that asked for 1 to 2 nodes.
    fewer = replace(config, run=replace(config.run, folder=str(tmp_path / "new")))
    assert after_lost_node(fewer, 1, env=JOB, planned=2, tell=told.append).mesh.tp == 1 and len(told) == 2
    waits = replace(fewer, run=replace(fewer.run, on_lost_node="wait"))
    assert after_lost_node(waits, 1, env=JOB, planned=2, tell=told.append) is waits
    # All nodes again, or a start by hand, or as many ranks as before: nothing is decided here.
    for env, world_size in ((AGAIN, 2), (JOB, 1), ({}, 1), ({**AGAIN, "SLURM_JOB_ID": "8"}, 1)):
        assert lost_ranks(config, world_size, env=env) == 0
        assert after_lost_node(config, world_size, env=env, tell=told.append) is config


def test_a_job_may_stop_wait_or_be_refused(tmp_path):
    config = started(tmp_path, TORCHRUN, "stop")

    def lost(world_size: int = 1, env: dict[str, str] = TORCHRUN, **keys: Any) -> RunConfig:
        asked = replace(config, run=replace(config.run, **keys))
        return after_lost_node(asked, world_size, env=env, tell=told.append, pause=waited.append)

    told, waited = list[str](), list[float]()
    with pytest.raises(LostNodeError, match=r'1 of 2 ranks are left, and run\.on_lost_node="stop"'):
        lost()
    with pytest.raises(
        StoppedError, match="the time to wait is over"
    ):  # torchrun ends ranks that wait, if a node joins
        lost(on_lost_node="wait", exit_after=1e-3)
    assert waited and told[0] == "1 of 2 ranks are left: waiting for torchrun to have the others, too"
    with pytest.raises(StoppedError, match="the time to wait is over"):
        lost(env={"TORCHELASTIC_RUN_ID": "job"}, on_lost_node="wait", exit_after=1e-3)
    waits = len(waited)
    # A launcher's script, as of Slurm, asks for as many.
    with pytest.raises(NodesAwaitedError, match=r'1 of 2 ranks are left, and run\.on_lost_node="wait"') as ended:
        wait_for_nodes(config, "1 of 2 ranks are left", 2, env=AGAIN, tell=told.append, pause=waited.append)
    assert ended.value.world_size == 2 and len(waited) == waits
    assert lost(on_lost_node=None).mesh.tp == 2, "not set: as it is"


def test_a_number_of_ranks_that_does_not_divide_the_batch_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.run.lost_nodes.lost_ranks", lambda *_, **__: 1)
    config = replace(run_in(tmp_path, on_lost_node="shrink"), mesh=MeshSection(tp=1))
    with pytest.raises(UsageError, match=r"finds no layout for them that keeps train\.global_batch\n.*=4") as refused:
        after_lost_node(config, 3, env={}, tell=lambda text: None)
    assert "train.global_batch=" in str(refused.value)
