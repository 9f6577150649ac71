"""torchrun with two "nodes" of two ranks on this machine: ranks, launchers and nodes that are killed; planned ends."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.helpers.examples import soaked
from tests.helpers.house_rules import ROOT
from tests.helpers.processes import children_of
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_config
from trainer.checkpoint.folder import latest_checkpoint
from trainer.config.parse import dump_config
from trainer.config.sections import CheckpointSection, MeshSection, RunConfig, TrainSection
from trainer.parallel.mesh import Mesh
from trainer.run.metrics import read_events, read_metrics
from trainer.run.train import train

NODES, RANKS = 2, 2


def run_in(folder: Path, *, steps: int) -> RunConfig:
    config = make_config(folder, blend="mock", valid=[], steps=steps, eval_interval=None)
    model = replace(config.model, vocab_size=300, num_layers=1, hidden_size=16, num_heads=2)
    saves = CheckpointSection(interval=5, minutes=0.0)
    batches: TrainSection = replace(config.train, micro_batch=1)
    return replace(config, mesh=MeshSection(), model=model, train=batches, checkpoint=saves)


@pytest.fixture
def torchrun(tmp_path: Path):
    """Start a torchrun for each node; ended with the test."""
    started = list[subprocess.Popen[bytes]]()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start(
        config: RunConfig,
        *,
        restarts: int,
        nodes: str = str(NODES),
        ranks: int = RANKS,
        which: Sequence[int] = range(NODES),
        store: TCPStore | None = None,
    ) -> list[subprocess.Popen[bytes]]:
        path = tmp_path / "run.toml"
        path.write_text(dump_config(config))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        for node in which:
            words = ["--nnodes", nodes, "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
            endpoint = f"127.0.0.1:{store.port if store else port}"
            words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "job"]
            words += ["--rdzv-conf", f"is_host={int(node == 0 and not store)}", "--local-addr", "127.0.0.1"]
            words += ["-m", "cli.mtrain", "train", str(path), "--quiet"]
            with (tmp_path / f"node-{node}.log").open("ab") as log:
                command = [sys.executable, "-m", "torch.distributed.run", *words]
                started.append(
                    subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log, process_group=0)
                )
        return started[-len(which) :]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pid in _ranks_of(tmp_path):  # that outlived their launcher
        os.kill(pid, signal.SIGKILL)


def _undisturbed(context, config: RunConfig) -> None:
    train(config, context.join(Mesh(context.world)))


def _curve(config: RunConfig):
    lines = read_metrics(Path(config.run.folder))
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def _starts(config: RunConfig):
    return [event for event in read_events(Path(config.run.folder)) if event["event"] == "start"]


def _wait(processes, condition, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        assert all(process.poll() is None for process in processes), "a node has ended"
        time.sleep(0.02)


def _ranks(node: subprocess.Popen[bytes]) -> list[int]:
    return [pid for pid in children_of(node.pid) if b"cli.mtrain" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", soaked([1, RANKS], but=[1]))
def test_a_run_whose_ranks_are_killed_is_that_of_an_undisturbed_one(tmp_path, torchrun, ranks):
    """That with rank 0; in `make soak` on either node."""
    straight, config = run_in(tmp_path / "straight", steps=80), run_in(tmp_path / "run", steps=80)
    killed = (1, 0) if ranks > 1 else (0,)
    nodes = torchrun(config, restarts=len(killed), ranks=ranks)
    for kills, node in enumerate(killed, 1):
        _wait(
            nodes,
            lambda kills=kills: (
                len(_starts(config)) == kills
                and len(_curve(config)) >= 7 * kills
                and latest_checkpoint(Path(config.run.folder, "checkpoints")) is not None  # saved beside the steps
            ),
        )
        os.kill(_ranks(nodes[node])[-1], signal.SIGKILL)
    assert [node.wait(300) for node in nodes] == [0, 0], (tmp_path / "node-0.log").read_text()[-3000:]
    starts = _starts(config)
    assert [start["attempt"] for start in starts] == list(range(1, len(killed) + 2))
    assert all(start["step"] % 5 == 0 for start in starts) and starts[-1]["step"] >= starts[1]["step"] > 0
    run_ranks(_undisturbed, NODES * ranks, straight, timeout_s=900)
    assert _curve(config) == _curve(straight)


def _ranks_of(folder: Path) -> list[int]:
    """All ranks of the run in this folder, also those whose launcher is gone."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if str(folder / "run.toml").encode() in words and b"torch.distributed.run" not in words:
                found.append(int(path.parent.name))
    return found


@pytest.mark.soak
@pytest.mark.timeout(2400)  # both limits of the test below; on a busy machine each start takes a minute
@pytest.mark.parametrize("seed", [1, 2])
def test_ten_kills_of_ranks_and_launchers_leave_the_run_of_an_undisturbed_one(tmp_path, torchrun, seed):
    """A launcher that has ended is started again, as a person or a service would do it."""
    straight, config = run_in(tmp_path / "straight", steps=1500), run_in(tmp_path / "run", steps=1500)
    draw, agents, kills, starts = random.Random(seed), torchrun(config, restarts=20), [], 0
    end = time.monotonic() + 1500
    while any(agent.poll() != 0 for agent in agents):
        assert time.monotonic() < end, (kills, (tmp_path / "node-0.log").read_text()[-3000:])
        for node, agent in enumerate(agents):
            if agent.poll() not in (None, 0):
                (agents[node],) = torchrun(config, restarts=20, which=[node])
        time.sleep(0.05)
        begun = _starts(config)
        curve = _curve(config) if len(kills) < 10 and len(begun) > starts else []
        if curve and curve[-1][0] > begun[-1]["step"] + 5:
            node, starts = draw.randrange(NODES), len(begun)
            victims = [*_ranks(agents[node]), agents[node].pid]
            kills.append((node, number := draw.randrange(len(victims)), curve[-1][0]))
            with suppress(ProcessLookupError):
                os.kill(victims[number], signal.SIGKILL)
    assert len(kills) == 10, "the run was done before"
    run_ranks(_undisturbed, NODES * RANKS, straight, timeout_s=900)
    assert _curve(config) == _curve(straight)
    _wait([], lambda: not _ranks_of(tmp_path), 60)


@pytest.mark.soak
@pytest.mark.parametrize("lost", ["any", "first"])
def test_of_one_to_two_nodes_the_one_that_is_left_goes_on(tmp_path, monkeypatch, torchrun, lost):
    """Without that of rank 0, if torchrun's store lies elsewhere."""
    straight, config = run_in(tmp_path / "straight", steps=1000), run_in(tmp_path / "run", steps=1000)
    config = replace(config, run=replace(config.run, on_lost_node="shrink"))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if lost == "first" else None
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", str(int(lost == "first")))
    nodes = torchrun(config, restarts=3, nodes="1:2", store=store)
    _wait(nodes, lambda: len(_starts(config)) == 1 and len(_curve(config)) >= 7)
    if lost == "first":
        nodes.sort(key=lambda node: _starts(config)[0]["process"] in _ranks(node))
    for pid in (nodes[1].pid, *_ranks(nodes[1])):
        os.kill(pid, signal.SIGKILL)
    assert nodes[0].wait(300) == 0, [log.read_text()[-3000:] for log in tmp_path.glob("node-*.log")]
    first, *_, last = _starts(config)
    assert (first["world_size"], last["world_size"]) == (4, 2) and last["step"] > 0
    run_ranks(_undisturbed, NODES * RANKS, straight, timeout_s=900)
    for line, expected in zip(_curve(config), _curve(straight), strict=True):
        assert line == pytest.approx(expected, rel=1e-3)


@pytest.mark.soak
def test_of_one_to_two_nodes_the_one_that_is_left_waits_for_the_other(tmp_path, monkeypatch, torchrun):
    straight, config = run_in(tmp_path / "straight", steps=300), run_in(tmp_path / "run", steps=300)
    config = replace(config, run=replace(config.run, on_lost_node="wait"))
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # otherwise nodes cannot join
    first, second = torchrun(config, restarts=1, nodes="1:2")
    _wait([first, second], lambda: len(_starts(config)) == 1 and len(_curve(config)) >= 12)
    before = {*_ranks(first)}
    for pid in (second.pid, *_ranks(second)):
        os.kill(pid, signal.SIGKILL)
    _wait([first], lambda: len(_ranks(first)) == RANKS and not before & {*_ranks(first)})
    time.sleep(15)  # in which they would go on
    (second,) = torchrun(config, restarts=1, nodes="1:2", which=[1])
    assert [node.wait(300) for node in (first, second)] == [0, 0], (tmp_path / "node-0.log").read_text()[-3000:]
    starts = _starts(config)
    assert [start["world_size"] for start in starts] == [4, 4] and starts[1]["step"] > 0
    run_ranks(_undisturbed, NODES * RANKS, straight, timeout_s=900)
    assert _curve(config) == _curve(straight)


@pytest.mark.slow
@pytest.mark.parametrize(("num_nodes", "shares_store"), soaked([(1, True), (2, True), (2, False)], but=[(1, True)]))
def test_a_run_that_ended_on_purpose_is_not_trained_on_by_the_restarts_of_its_job(
    tmp_path, monkeypatch, torchrun, num_nodes, shares_store
):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", str(int(not shares_store)))
    config = run_in(tmp_path / "run", steps=10**6)
    config = replace(config, run=replace(config.run, exit_after=0.01))
    nodes = torchrun(config, restarts=1, ranks=1, nodes=str(num_nodes), which=range(num_nodes))
    assert [node.wait(300) for node in nodes] == [1] * num_nodes, "torchrun's own code"
    (start,) = _starts(config)
    assert start["step"] == 0
    (stopped,) = (event for event in read_events(Path(config.run.folder)) if event["event"] == "stopped")
    assert stopped["saved"] and _curve(config)[-1][0] == stopped["step"]
    log = (tmp_path / "node-0.log").read_text()
    assert "not started again in this job of torchrun: stopped at run.exit_after=0.01 minutes" in log
