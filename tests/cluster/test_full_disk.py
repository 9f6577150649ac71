"""A small file system that fills up under a run of two nodes: named with rank and host, and the run goes on later.

Each node is one rank, started as srun does it. The file system of one node alone is in a mount namespace of its own.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.test_torchrun import run_in
from tests.helpers.house_rules import ROOT
from tests.helpers.processes import wait_until
from tests.helpers.small_disk import FILLER, fill, missing, small_disk
from trainer.config.parse import dump_config
from trainer.config.sections import RunConfig
from trainer.run.metrics import read_events, read_metrics

pytestmark = [pytest.mark.soak, pytest.mark.skipif(missing() is not None, reason=missing() or "")]
NODES, STEPS = 2, 600


def start(config: RunConfig, folder: Path) -> list[subprocess.Popen[str]]:
    path = folder / "run.toml"
    path.write_text(dump_config(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": NODES, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_PORT": str(port)}
    environment |= {name: str(value) for name, value in shared.items()}
    words = ["unshare", "--mount", sys.executable, "-m", "cli.mtrain", "train", str(path), "--quiet"]
    return [
        subprocess.Popen(
            words,
            cwd=folder,
            env={**environment, "RANK": str(rank), "SLURMD_NODENAME": f"node{rank}"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NODES)
    ]


def ended(nodes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """(exit code, what it said of its error) of each."""
    return [(node.wait(), said) for node in nodes for _, said in [node.communicate(timeout=300)]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    config = run_in(folder / "run", steps=STEPS)
    assert [code for code, _ in ended(start(config, folder))] == [0, 0]
    return curve(config)


def curve(config: RunConfig):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in read_metrics(Path(config.run.folder))]


def wait_for(config: RunConfig, step: int) -> None:
    wait_until(lambda: len(curve(config)) >= step, 120)


def mount_without_space(rank: int, checkpoints: Path) -> None:
    """In the namespace of this process alone, over its checkpoints, while it writes none."""
    os.kill(rank, signal.SIGSTOP)
    while list(checkpoints.glob(".*.partial")):
        os.kill(rank, signal.SIGCONT)
        time.sleep(0.05)
        os.kill(rank, signal.SIGSTOP)
    own = ["nsenter", "--mount", f"--target={rank}"]
    subprocess.run([*own, "mount", "-t", "tmpfs", "-o", "size=4k", "none", str(checkpoints)], check=True)
    os.kill(rank, signal.SIGCONT)


def test_a_run_folder_without_space_for_metrics(tmp_path, undisturbed):
    config = run_in(tmp_path / "run", steps=STEPS)
    config = replace(config, checkpoint=replace(config.checkpoint, folder=str(tmp_path / "checkpoints")))
    with small_disk(tmp_path / "run", 8192):
        nodes = start(config, tmp_path)
        wait_for(config, 20)
        fill(tmp_path / "run")
        (code, said), (other_code, _) = ended(nodes)
        assert (code, other_code) == (5, 5), said
        # The last block of events.jsonl may be full before that of metrics.jsonl.
        assert re.search(rf"rank 0 on node0: {tmp_path}/run/(metrics|events)\.jsonl: No space left on device\n", said)
        assert len(said.splitlines()) <= 4
        (tmp_path / "run" / FILLER).unlink()
        assert [code for code, _ in ended(start(config, tmp_path))] == [0, 0]
        assert curve(config) == undisturbed
        assert [event["step"] for event in read_events(tmp_path / "run") if event["event"] == "start"][1] > 0


def test_a_node_without_space_for_its_part_of_a_checkpoint(tmp_path, undisturbed):
    config = run_in(tmp_path / "run", steps=STEPS)
    nodes, checkpoints = start(config, tmp_path), tmp_path / "run/checkpoints"
    wait_for(config, 12)
    mount_without_space(nodes[1].pid, checkpoints)
    ends = ended(nodes)
    assert [code for code, _ in ends] == [5, 5], ends
    for _, said in ends:
        assert "the older ones are intact" in said and "rank 1 on node1 writing a checkpoint: " in said
        assert "No space left on device" in said and len(said.splitlines()) <= 4
    assert not [path for path in checkpoints.iterdir() if path.name.endswith(".partial")]
    assert [code for code, _ in ended(start(config, tmp_path))] == [0, 0]
    assert curve(config) == undisturbed
    assert [event["step"] for event in read_events(tmp_path / "run") if event["event"] == "start"][1] > 0
