"""Whole runs on a GPU, in processes of their own; skipped where there is none.

What CPUs show of resuming and of errors is tested beside the code. Here is what only a GPU can show: kernels that
are bitwise repeatable under run.deterministic, copies on a stream of their own, and memory that runs out.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from trainer.checkpoint.folder import latest_checkpoint
from trainer.checkpoint.format import Index
from trainer.checkpoint.load import verify_checkpoint
from trainer.run.metrics import read_metrics
from trainer.run.prove import COMPUTED

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

CONFIG = """
[model]
vocab_size = 5000
num_layers = 4
hidden_size = 512
num_heads = 8
num_kv_heads = 4
norm = "rmsnorm"
activation = "swiglu"
position = "rope"
[data]
blend = "mock"
[train]
sequence_length = 512
global_batch = 8
micro_batch = 4
steps = 60
[optimizer]
lr = 1e-3
warmup_steps = 5
[precision]
dtype = "bf16"
[checkpoint]
interval = 1
keep = 2
[run]
deterministic = true
"""


def _start(folder: Path, *words: str) -> subprocess.Popen[str]:
    config = folder.with_suffix(".toml")
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "cli.mtrain", "train", str(config), f"run.folder={folder}", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(folder: Path, *words: str) -> None:
    process = _start(folder, *words)
    output, _ = process.communicate()
    assert process.returncode == 0, output[-3000:]


def _curve(folder: Path) -> list[list[object]]:
    return [[line.get(name) for name in COMPUTED] for line in read_metrics(folder)]


def _state(folder: Path) -> Index:
    newest = latest_checkpoint(folder / "checkpoints")
    assert newest is not None
    return verify_checkpoint(newest)


def _kill_after(folder: Path, step: int, *words: str, delay_s: float) -> bool:
    """Start or continue the run and kill it so long after this step was recorded; whether it was killed in time."""
    process = _start(folder, *words)
    while process.poll() is None:
        if (folder / "metrics.jsonl").exists() and any(line["step"] >= step for line in read_metrics(folder)):
            time.sleep(delay_s)
            process.kill()
        time.sleep(0.02)
    output = process.communicate()[0]
    assert process.returncode in (0, -9), output[-3000:]
    return process.returncode == -9


TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
FOUR = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four GPUs")
# Both ranks have a copy of the norms' weights, and a checkpoint holds one: they once drifted apart in fp32.
COPIES = ("--nproc", "2", "mesh.tp=2", "mesh.sequence_parallel=true", "precision.dtype=fp32", "train.micro_batch=1")


OFTEN, TWICE = (4, 13, 27, 28, 44), (13, 28)  # the steps after which a run is killed
GRAPHS = ("kernels.cuda_graphs=on", "train.micro_batch=1")
PP2, TP2 = ("mesh.pp=2", "mesh.schedule=zb_v"), ("mesh.tp=2", "mesh.sequence_parallel=true")


@pytest.mark.parametrize(
    ("layout", "kills"),
    [
        pytest.param((), OFTEN, id="plain"),
        pytest.param(("precision.gradients=params",), OFTEN, id="half gradients"),
        pytest.param(COPIES, TWICE, id="tp 2", marks=TWO),
        pytest.param(("--nproc", "2", *PP2, *GRAPHS), TWICE, id="pp 2, graphs", marks=TWO),
        pytest.param(("--nproc", "4", *TP2, *GRAPHS), TWICE, id="tp 2, dp 2, graphs", marks=FOUR),
        pytest.param(("--nproc", "4", *TP2, *PP2, *GRAPHS), TWICE, id="tp 2, pp 2, graphs", marks=FOUR),
    ],
)
def test_a_run_that_is_killed_with_saves_in_flight_goes_on_bit_for_bit(tmp_path, layout, kills):
    """kill -9 after some steps with a save at each; curve and state are those of a run that was left alone."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    _finish(straight, *layout)
    chance = random.Random(3)
    in_time = sum(_kill_after(killed, step, *layout, delay_s=chance.uniform(0, 0.2)) for step in kills)
    assert in_time >= len(kills) - 1
    _finish(killed, *layout)
    assert _curve(killed) == _curve(straight)
    assert len(_curve(killed)) == 60
    assert _state(killed).tensors == _state(straight).tensors


def test_without_memory_the_error_names_what_was_held_and_which_keys_need_less(tmp_path):
    process = _start(
        tmp_path / "run",
        "train.sequence_length=8192",
        "train.micro_batch=256",
        "train.global_batch=256",
        "model.hidden_size=4096",
        "model.num_heads=32",
    )
    output, _ = process.communicate()
    assert process.returncode == 5
    error = output[output.index("error:") :]
    assert "GiB" in error and "train.micro_batch" in error and "recompute" in error
    assert len(error.strip().splitlines()) <= 4
    assert "Traceback" not in output


@TWO
def test_ranks_with_graphs_of_collectives_end(tmp_path):
    """They once waited in destroy_process_group for the graph of the update, which nothing had destroyed."""
    graphs = ("--nproc", "2", "mesh.tp=2", "mesh.sequence_parallel=true", "kernels.cuda_graphs=on", "train.steps=5")
    process = _start(tmp_path / "run", *graphs)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-3000:]
    assert "communicators did not close" not in output
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") is not None
