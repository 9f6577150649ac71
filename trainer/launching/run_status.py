"""The status of a run, from its folder and its scheduler, and requests to stop it.

A run that was not launched with `mtrain launch` has no job, but the same follows from its metrics and the lock of its
folder. A killed process leaves no record: a run counts as silent if nothing in its folder was written for a minute,
since it reports progress every 10 s.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mdata.errors import ResourceError, UsageError, os_errors_named
from mdata.launching.job_status import STOPPED, is_silent, last_lines
from mdata.util import atomic_io, file_lock
from trainer.launching.job import JOB, End, RunJob, ends, load_job
from trainer.launching.on_slurm import SlurmState, run_folder_of, slurm_restarts, slurm_state, stop_in_slurm

Condition = Literal["waiting", "running", "silent", "done", "stopped", "failed"]
METRICS, EVENTS = "metrics.jsonl", "events.jsonl"  # trainer/run/metrics.py would import torch
_LINE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """A run.

    Args:
        condition: waiting: in the queue. stopped: the same command continues it. step: finished steps, of `steps`.
        loss, tokens_per_s: of the last line of metrics.jsonl.
        restarts: since the last launch. slurm: while the job waits or runs. end: of the last attempt.
        holder: the process that trains in the folder, according to its lock.
    """

    condition: Condition
    step: int
    steps: int | None
    loss: float | None
    tokens_per_s: float | None
    restarts: int
    slurm: SlurmState | None
    end: End | None
    holder: str | None


def run_of(text: str) -> tuple[Path, RunJob | None]:
    """The run folder and its job, from a run folder, its job folder, or a Slurm job id.

    Raises:
        UsageError: it is something else.
    """
    path = Path(text)
    if text.isdecimal() and not path.exists():
        folder = run_folder_of(text)
        if folder is None:
            raise UsageError(
                f"Slurm knows no job {text} that mtrain launch submitted",
                expected="a job that waits, runs or ended a moment ago, or a run folder",
                fix="give the run folder",
            )
        return folder, load_job(folder)
    if path.name == JOB and (path / "job.json").is_file():
        path = path.parent
    job = load_job(path)
    if job is None and not (path / "config.toml").is_file():
        raise UsageError(
            f"{path} is not a run folder",
            found=None if path.exists() else "nothing of that name",
            expected="a folder that mtrain launch or mtrain train made, or the number of a job",
        )
    return path, job


def run_status(folder: Path, job: RunJob | None) -> RunStatus:
    """Look at a run.

    Raises:
        UsageError, ResourceError: it is a Slurm job, and Slurm is not installed or does not answer.
    """
    line = _last_line(folder / METRICS)
    slurm = slurm_state(job.id) if job is not None and job.engine == "slurm" else None
    attempt_ends = ends(job) if job is not None else []
    end, holder = attempt_ends[-1] if attempt_ends else None, file_lock.held_by(folder / ".lock")
    steps = _steps(folder)
    return RunStatus(
        condition=_condition(
            folder, job, slurm, end=end, holder=holder, done=steps is not None and line.get("step") == steps
        ),
        step=int(line.get("step") or 0),
        steps=steps,
        loss=line.get("loss"),
        tokens_per_s=line.get("tokens_per_s"),
        restarts=slurm_restarts(job.id) if job is not None and slurm else max(0, len(attempt_ends) - 1),
        slurm=slurm,
        end=end,
        holder=holder,
    )


def is_active(job: RunJob) -> bool:
    """Whether a job is queued or running, so that it need not be launched."""
    return slurm_state(job.id) is not None if job.engine == "slurm" else job.is_same_process()


def ask_to_stop(job: RunJob) -> bool:
    """Ask the ranks to save and end; a queued job leaves the queue. False: it is neither queued nor running.

    Raises:
        UsageError: the process is on another host.
    """
    if job.engine == "slurm":
        state = slurm_state(job.id)
        if state is not None:
            with os_errors_named("stopping the run"):
                atomic_io.atomic_write(job.stop_mark, b"")  # first: the job must not be queued again
            try:
                stop_in_slurm(job, state)
            except ResourceError:  # Slurm fails, or the job has ended since
                if slurm_state(job.id) is not None:
                    raise
                return False
        return state is not None
    if job.host != os.uname().nodename:
        raise UsageError(f"{job.run_folder} was launched on {job.host}", fix="run mtrain stop there")
    alive = job.is_same_process()
    if alive:
        os.kill(int(job.id), signal.SIGTERM)
    return alive


def _condition(
    folder: Path, job: RunJob | None, slurm: SlurmState | None, *, end: End | None, holder: str | None, done: bool
) -> Condition:
    if slurm is not None and slurm.waits:
        return "waiting"
    alive = slurm is not None or (holder is not None if job is None else job.is_same_process())
    written = [folder / METRICS, folder / EVENTS, *([job.log] if job is not None else [])]
    elsewhere = job is not None and job.engine != "slurm" and job.host != os.uname().nodename and end is None
    if alive or elsewhere:
        return "silent" if is_silent(written, now=time.time()) else "running"
    if end is None:
        return "done" if done else "stopped"
    return "done" if end.code == 0 else "stopped" if end.code in STOPPED else "failed"


def _last_line(path: Path) -> dict[str, Any]:
    for text in reversed(last_lines(path, _LINE_BYTES)):
        try:
            line = json.loads(text)
        except ValueError:  # torn
            continue
        if isinstance(line, dict):
            return line
    return {}


def _steps(folder: Path) -> int | None:
    try:
        return int(json.loads((folder / "plan.json").read_bytes())["steps"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
