"""Print the last lines of a job's logs: of the parts that failed or are running, or of the parts that you name.

JOB is the folder PREFIX.job that mdata launch made, or PREFIX.

Examples:
  mdata tail big
  mdata tail big --part 1 2 --lines 20
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import mdata
from mdata.launching.job_folder import MERGE, Job, load_job
from mdata.launching.job_status import job_status, last_lines

from .console import Console, Parser

_LINE_BYTES = 400
_WAIT_S = 0.5


def add_arguments(parser: Parser) -> None:
    """The job, which parts, and how many lines."""
    add = parser.add_argument
    add("job", metavar="JOB", help="PREFIX.job, or PREFIX")
    add("--part", type=int, nargs="+", metavar="K", help="these parts; 0 is the merge")
    add("--lines", type=int, default=5, metavar="N", help="of each log; default 5")
    add("--follow", action="store_true", help="keep printing until the job ends")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Print, and continue with --follow."""
    job = load_job(Path(arguments.job))
    if wrong := [number for number in arguments.part or [] if not 0 <= number <= job.num_parts]:
        raise mdata.UsageError(f"--part {wrong[0]}", expected=f"0 (the merge) to {job.num_parts}")
    numbers = arguments.part or _interesting(job)
    if arguments.lines < 1:
        raise mdata.UsageError(f"--lines {arguments.lines}", expected="at least 1")
    sizes: dict[int, int] = {}
    for number in numbers:
        lines = last_lines(job.log(number), arguments.lines * _LINE_BYTES)[-arguments.lines :]
        sizes[number] = _size(job.log(number))
        _show(console, job, number, lines)
    console.flush()
    while arguments.follow and not (job.is_merged() and not job.missing()):
        time.sleep(_WAIT_S)
        for number in arguments.part or _interesting(job):
            grown = _size(job.log(number)) - sizes.get(number, 0)
            if grown > 0:
                _show(console, job, number, last_lines(job.log(number), grown))
                sizes[number] = sizes.get(number, 0) + grown
        console.flush()


def _interesting(job: Job) -> list[int]:
    parts = job_status(job).parts
    numbers = [p.number for p in parts if p.condition in ("failed", "silent", "running", "stopped")]
    return numbers or [MERGE]


def _show(console: Console, job: Job, number: int, lines: list[str]) -> None:
    if lines:
        console.write(f"==> {job.log(number)} <==\n" + "\n".join(lines) + "\n")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
