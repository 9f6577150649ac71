"""Show the progress of a job, from its files alone: parts done, running and failed, rate and time left.

JOB is the folder PREFIX.job that mdata launch made, or PREFIX.

Examples:
  mdata status big
  mdata status big.job --all
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from mdata.errors import counted
from mdata.launching.job_folder import load_job
from mdata.launching.job_status import CONDITIONS, JobStatus, job_status

from .console import Console, Parser
from .text import table


def add_arguments(parser: Parser) -> None:
    """The job, and whether each part is listed."""
    parser.add_argument("job", metavar="JOB", help="PREFIX.job, or PREFIX")
    parser.add_argument("--all", action="store_true", help="list every part, not only those that run or failed")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Read the job's files and print its progress."""
    job = load_job(Path(arguments.job))
    status = job_status(job)
    shown = [p for p in status.parts if arguments.all or p.condition not in ("done", "waiting")]
    rows = [
        (
            p.number if p.phase == "part" else p.name,
            p.condition,
            f"{p.done_bytes / 1e6:.1f}",
            f"{p.bytes_per_s / 1e6:.1f}",
            p.host or None,
            p.attempt,
            p.code,
        )
        for p in shown
    ]
    head = ("part", "is", "MB done", "MB/s", "host", "attempts", "exit code")
    text = f"{_summary(status)}\n{table(head, rows) if rows else ''}"
    console.result(text, {"job": str(job.folder), **asdict(status)})


def _summary(status: JobStatus) -> str:
    merged = {None: "", True: "; merged", False: "; not merged yet"}[status.merged]
    lines = []
    for phase, of_phase in groupby(status.parts, lambda part: part.phase):
        conditions = Counter(part.condition for part in of_phase)
        counts = ", ".join(f"{conditions[name]:,} {name}" for name in CONDITIONS if conditions[name])
        parts = counted(conditions.total(), "part")
        lines.append(f"{parts}: {counts}{merged}" if phase == "part" else f"{phase}: {counts}")
    rate = f"{status.bytes_per_s / 1e6:,.1f} MB/s"
    left = "unknown" if status.seconds_left is None else _duration(status.seconds_left)
    lines.append(f"{status.done_bytes / 1e6:,.1f} of {status.input_bytes / 1e6:,.1f} MB, {rate}, time left: {left}")
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
