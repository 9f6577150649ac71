"""The progress of a job, from its files alone: results, state files, and the last lines of logs.

The state file of a process that was killed, or whose node died, still says that it runs. On this host the process is
looked up; elsewhere it counts as silent if log and state have not changed for a minute, since a part reports every 10
s.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mdata.launching.job_folder import Job, JobPhase, PartState, read_state

Condition = Literal["done", "running", "silent", "stopped", "failed", "waiting"]
CONDITIONS: tuple[Condition, ...] = ("done", "running", "silent", "stopped", "failed", "waiting")
_SILENT_AFTER_S = 60.0
_TAIL_BYTES = 1 << 14
STOPPED = (75, 130)
"""Exit codes after which the same command continues: stopped on request, by Ctrl-C."""


@dataclass(frozen=True)
class PartStatus:
    """One task: its condition, bytes of input done, bytes a second, where it runs, and its last exit code."""

    number: int
    condition: Condition
    done_bytes: int
    bytes_per_s: float
    host: str
    attempt: int
    code: int | None
    phase: str = "part"
    name: str = ""


@dataclass(frozen=True)
class JobStatus:
    """All tasks except the merge.

    Attributes:
        parts: in order.
        counts: number of tasks in each condition.
        done_bytes: of the input, of `input_bytes`.
        bytes_per_s: of all parts that run, together.
        seconds_left: until the parts are done at this rate; None: nothing runs.
        merged: whether the merge has succeeded; None: there is no merge.
    """

    parts: tuple[PartStatus, ...]
    counts: dict[str, int]
    done_bytes: int
    input_bytes: int
    bytes_per_s: float
    seconds_left: float | None
    merged: bool | None


def job_status(job: Job, *, now_s: float | None = None) -> JobStatus:
    """Examine every part; `now_s`: a time other than now."""
    now = time.time() if now_s is None else now_s
    parts: list[PartStatus] = []
    for phase in job.phases:
        if phase.name != "merge":
            finished = phase.done()
            parts += (_part(job, phase, number, now=now, done=number in finished) for number in phase.numbers)
    counts = Counter(part.condition for part in parts)
    rate = sum(part.bytes_per_s for part in parts if part.condition == "running")
    done = sum(part.done_bytes for part in parts)
    left = max(0, job.input_bytes - done)
    return JobStatus(
        parts=tuple(parts),
        counts={condition: counts[condition] for condition in CONDITIONS if counts[condition]},
        done_bytes=done,
        input_bytes=job.input_bytes,
        bytes_per_s=rate,
        seconds_left=0.0 if counts["done"] == len(parts) else left / rate if rate else None,
        merged=None if job.merge == "none" else job.is_merged(),
    )


def _part(job: Job, phase: JobPhase, number: int, *, now: float, done: bool) -> PartStatus:
    state = read_state(job, number) or PartState("waiting")
    share = job.input_bytes * number // job.num_parts - job.input_bytes * (number - 1) // job.num_parts
    share = share if number <= job.num_parts else 0  # later phases read no input
    said = last_progress(job.log(number)) if state.attempt and not done else {}
    return PartStatus(
        number,
        "done" if done else _condition(job, number, state, now=now),
        share if done else min(int(said.get("done") or 0), share),
        float(said.get("mb_per_s") or 0) * 1e6,
        state.host,
        state.attempt,
        state.code,
        phase.name,
        phase.called(number),
    )


def _condition(job: Job, number: int, state: PartState, *, now: float) -> Condition:
    if state.event == "waiting":
        return "waiting"
    if state.event == "ended":
        return "stopped" if state.code in STOPPED else "failed"
    if state.host == os.uname().nodename and not Path(f"/proc/{state.pid}").exists():
        return "stopped"
    return "silent" if is_silent((job.log(number), job.state_path(number)), now=now) else "running"


def is_silent(paths: Iterable[Path], *, now: float) -> bool:
    """Whether none of these files was written within the last minute."""
    return now - max(map(_moved_at, paths)) >= _SILENT_AFTER_S


def _moved_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def last_progress(log: Path) -> dict[str, Any]:
    """The last line of progress in a log; empty if there is none."""
    for line in reversed(last_lines(log, _TAIL_BYTES)):
        if line.startswith('{"doing"'):
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if said.get("unit") == "B" and isinstance(said, dict):
                return said
    return {}


def last_lines(log: Path, num_bytes: int) -> list[str]:
    """The complete lines in the last bytes of a log; none if it does not exist."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            text = file.read(num_bytes).decode(errors="replace")
    except OSError:
        return []
    lines = text.splitlines()
    return lines[1:] if size > num_bytes else lines
