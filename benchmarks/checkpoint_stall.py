"""How long do checkpoints stall training, written in the background or not?

    python benchmarks/checkpoint_stall.py --out DIR [--preset llama3.2-1b] [--rows background]

Trains a preset on mock data with `mtrain train` and saves every so many steps. Of each save: what the steps from it to
the next took beyond as many median steps (the stall, as a part of 10 minutes, the default time between saves), the
seconds until the checkpoint existed, and the bytes a second. Steps are timed by when the host reads their reports, so
that a wait anywhere in the loop counts. DIR should be on the disk that checkpoints are meant for.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INTERVAL_S = 600.0  # checkpoint.minutes by default
ROWS = {"background": "true", "foreground": "false"}
WARMUP = 5  # steps


def train(folder: Path, arguments: argparse.Namespace, background: str) -> None:
    """A run that saves every interval, the last step included."""
    config = folder.with_suffix(".toml")
    config.write_text(f'[model]\npreset = "{arguments.preset}"\n[data]\nblend = "mock"\n[train]\nsteps = 1\n')
    words = {
        "run.folder": folder,
        "train.sequence_length": 4096,
        "train.global_batch": 8,
        "train.micro_batch": 2,
        "train.steps": arguments.steps,
        "optimizer.lr": 1e-4,
        "optimizer.warmup_steps": 10,
        "precision.dtype": "bf16",
        "checkpoint.interval": arguments.interval,
        "checkpoint.minutes": 0,
        "checkpoint.keep": 1,
        "checkpoint.background": background,
    }
    command = [
        sys.executable,
        "-m",
        "cli.mtrain",
        "train",
        str(config),
        *(f"{key}={one}" for key, one in words.items()),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"mtrain train ended with {done.returncode}\n{done.stderr[-3000:]}")


def saves(folder: Path, interval: int) -> list[dict[str, Any]]:
    """Each save but that of the last step, which has no steps beside it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = {line["step"]: line["time_s"] for line in lines}
    steps = {step: times[step] - times[step - 1] for step in times if step - 1 in times and step > WARMUP}
    ordinary = statistics.median(steps.values())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    taken = {event["step"]: event["seconds"] for event in events if event["event"] == "saved"}
    newest = max((folder / "checkpoints").glob("step-*"), key=lambda path: path.stat().st_mtime)
    size = sum(path.stat().st_size for path in newest.iterdir())
    found = []
    for step, seconds in sorted(taken.items())[:-1]:
        later = [steps[one] for one in range(step, step + interval) if one in steps]
        stall = sum(later) - ordinary * len(later)
        found.append(
            {
                "step": step,
                "step_s": round(ordinary, 4),
                "longest_step_s": round(max(later), 4),
                "stall_s": round(stall, 3),
                "percent_of_10_minutes": round(100 * stall / INTERVAL_S, 3),
                "written_in_s": seconds,
                "gb_per_s": round(size / 1e9 / seconds, 2),
            }
        )
    return found


def main() -> None:
    """Measure each row and print its saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs, which are removed")
    parser.add_argument("--preset", default="llama3.2-1b")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--interval", type=int, default=30, help="steps between saves")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.rows:
        folder = arguments.out.resolve() / name
        train(folder, arguments, ROWS[name])
        for save in saves(folder, arguments.interval):
            print(json.dumps({"row": name, "preset": arguments.preset, **save}), flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
