"""Each script in examples/ is run; one whose library is not installed is skipped, and counted in the closing line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.helpers.house_rules import ROOT

EXAMPLES = ROOT / "examples"


def run(words: list[object], folder) -> str:
    """What a program prints, in a folder, without GPUs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        environment.pop(name, None)
    words = [sys.executable, *map(str, words)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_train_loop_goes_on_in_another_layout(tmp_path):
    script = EXAMPLES / "train_loop.py"
    assert len(script.read_text().splitlines()) <= 60
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    lines = run([*torchrun, script, f"run.folder={tmp_path / 'run'}"], tmp_path).splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        *(f"tp 2 x dp 1, step {step}" for step in range(1, 6)),
        *(f"tp 1 x dp 2, step {step}" for step in (6, 7)),
    ]
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"latest", "step-5", "step-7"}
