"""Jobs for tests, and programs of Slurm that only write down how they were called."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.launching.job import RunJob


def a_job(folder: Path, **more) -> RunJob:
    known = {
        "engine": "slurm",
        "words": ("run.toml",),
        "cwd": str(folder),
        "run_folder": str(folder / "runs" / "first"),
        "nodes": (2, 2),
        "ranks_per_node": 4,
        "id": "7",
    }
    return RunJob(**{**known, **more})


def programs(folder: Path, **scripts: str) -> dict[str, str]:
    """Programs of these names in a folder of their own; the environment in which they are found first."""
    folder.mkdir(exist_ok=True)
    for name, body in scripts.items():
        (folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {folder}/calls\n{body}\n')
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def calls(folder: Path) -> list[str]:
    """How the programs were called, in order."""
    path = folder / "calls"
    return path.read_text().splitlines() if path.exists() else []
