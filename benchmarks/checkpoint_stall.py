"""How long do checkpoints stall training, written in the background or not?

    python benchmarks/checkpoint_stall.py --out DIR [--preset llama3.2-1b] [--rows background]

Trains a preset on mock data with `mtrain train` and saves every so many steps. Of each save: what the steps from it to
the next took beyond as many median steps (the stall, as a part of 10 minutes, the default time between saves), the
seconds until the checkpoint existed, the bytes a second, and the most host memory of a rank. Steps are timed by when
the host reads their reports, so that a wait anywhere in the loop counts. DIR should be on the disk that checkpoints
are meant for. A run is killed one step before its last, so that it saves only at the interval: a run that saves once
needs room for one checkpoint.

A 7B model on two GPUs (81 GB, one save):

    python benchmarks/checkpoint_stall.py --out DIR --preset llama2-7b --nproc 2 --rows background --steps 80 \
        --interval 40 --set mesh.tp=2 mesh.sequence_parallel=true train.micro_batch=1
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INTERVAL_S = 600.0  # checkpoint.minutes by default
ROWS = {"background": "true", "foreground": "false"}
WARMUP = 5  # steps


def train(folder: Path, arguments: argparse.Namespace, background: str) -> float:
    """A run that saves every interval and is killed one step before its end; the most host memory of a rank, GiB."""
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
    words |= dict(word.split("=", 1) for word in arguments.set)
    overrides = [f"{key}={one}" for key, one in words.items()]
    command = [sys.executable, "-m", "cli.mtrain", "train", str(config), *overrides, "--nproc", str(arguments.nproc)]
    log = folder.with_suffix(".log")
    with log.open("w") as output:
        run = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
    memory = 0.0
    try:
        while run.poll() is None and last_step(folder) < arguments.steps - 1:
            memory = max(memory, host_gib(run.pid))
            time.sleep(0.2)
        if run.poll() is not None:
            sys.exit(f"mtrain train ended with {run.returncode}\n{log.read_text()[-3000:]}")
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    return memory


def last_step(folder: Path) -> int:
    """The last step in metrics.jsonl; 0 before the first."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return 0
    steps = [json.loads(line)["step"] for line in lines[-2:] if line.endswith("\n")]
    return steps[-1] if steps else 0


def host_gib(launcher: int) -> float:
    """The largest of a process and its descendants, at its peak, in GiB. Linux."""
    parents, peaks = {}, {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        parents[int(fields["Pid"])] = int(fields["PPid"])
        peaks[int(fields["Pid"])] = int(fields.get("VmHWM", "0 kB").split()[0])

    def is_ours(pid: int) -> bool:
        return pid == launcher or (pid in parents and is_ours(parents[pid]))

    return max((kib for pid, kib in peaks.items() if is_ours(pid)), default=0) / 2**20


def saves(folder: Path, interval: int) -> list[dict[str, Any]]:
    """Each save of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    times = {line["step"]: line["time_s"] for line in lines}
    steps = {step: times[step] - times[step - 1] for step in times if step - 1 in times and step > WARMUP}
    ordinary = statistics.median(steps.values())
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    taken = {event["step"]: event["seconds"] for event in events if event["event"] == "saved"}
    newest = max((folder / "checkpoints").glob("step-*"), key=lambda path: path.stat().st_mtime)
    size = sum(path.stat().st_size for path in newest.iterdir())
    found = []
    for step, seconds in sorted(taken.items()):
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
    parser.add_argument("--nproc", type=int, default=1, help="ranks")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--interval", type=int, default=30, help="steps between saves")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of the configuration")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.rows:
        folder = arguments.out.resolve() / name
        memory = train(folder, arguments, ROWS[name])
        for save in saves(folder, arguments.interval):
            found = {"row": name, "preset": arguments.preset, **save, "host_gib_of_a_rank": round(memory, 2)}
            print(json.dumps(found), flush=True)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
