"""Print the last lines of a job's logs: of parts that failed or are running, or of the parts that you name.

JOB is the folder PREFIX.job that mdata launch made, or PREFIX.

Examples:
  mdata tail big
  mdata tail big --part 1 2 --lines 20
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mdata
from mdata.launching.job_folder import MERGE, SINGLE_TASKS, Job, load_job
from mdata.launching.job_status import job_status, last_lines

from .console import Console, Parser

_LINE_BYTES = 400
_WAIT_S = 0.5


def add_arguments(parser: Parser) -> None:
    """The job, which parts, and how many lines."""
    add = parser.add_argument
    add("job", metavar="JOB", help="PREFIX.job, or PREFIX")
    add("--part", type=int, nargs="+", metavar="K", help="show only these parts (0 = merge)")
    add("--lines", type=int, default=5, metavar="N", help="lines of each log (default: 5)")
    add("--follow", action="store_true", help="keep printing until the job ends")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Print, and continue with --follow."""
    job = load_job(Path(arguments.job))
    numbers = [number for phase in job.phases for number in phase.numbers]
    if wrong := [number for number in arguments.part or [] if number not in {MERGE, *numbers}]:
        raise mdata.UsageError(f"--part {wrong[0]}", expected=f"0 (the merge) to {max(numbers)}")
    print_logs(
        console,
        lambda: [job.log(number) for number in arguments.part or _interesting(job)],
        lines=arguments.lines,
        ended=lambda: not arguments.follow or not job.to_run(),
    )


def print_logs(
    console: Console,
    logs: Callable[[], Sequence[Path]],
    *,
    lines: int,
    ended: Callable[[], bool],
    ask_every_s: float = _WAIT_S,
) -> None:
    """Print the last lines of logs, then what is added to them until `ended`, which is asked now and then."""
    if lines < 1:
        raise mdata.UsageError(f"--lines {lines}", expected="at least 1")
    sizes: dict[Path, int] = {}
    for path in logs():
        sizes[path] = _size(path)
        _show(console, path, last_lines(path, lines * _LINE_BYTES)[-lines:])
    console.flush()
    asked_s, is_over = time.monotonic(), ended()
    while not is_over:
        time.sleep(_WAIT_S)
        if time.monotonic() - asked_s >= ask_every_s:
            asked_s, is_over = time.monotonic(), ended()
        for path in logs():  # after `ended`, so that the last lines are there
            grown = _size(path) - sizes.get(path, 0)
            if grown > 0:
                _show(console, path, last_lines(path, grown + 1))  # with the end of the line before
                sizes[path] = sizes.get(path, 0) + grown
        console.flush()


def _interesting(job: Job) -> list[int]:
    parts = job_status(job).parts
    numbers = [p.number for p in parts if p.condition in ("failed", "silent", "running", "stopped")]
    return numbers or [job.phases[-1].numbers[-1] if job.phases[-1].name in SINGLE_TASKS else MERGE]


def _show(console: Console, path: Path, lines: list[str]) -> None:
    if lines:
        console.write(f"==> {path} <==\n" + "\n".join(lines) + "\n")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
