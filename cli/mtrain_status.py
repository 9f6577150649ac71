"""Show the state of a run: waiting, running or ended, its step and loss, restarts, and the last error.

RUN is a run folder, started with mtrain launch or not; or the number of a Slurm job that mtrain launch submitted.

Examples:
  mtrain status runs/first
  mtrain status runs/first --json
"""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import asdict

from mdata.errors import counted
from trainer.launching.job import RunJob
from trainer.launching.run_status import RunStatus, run_of, run_status

from .console import Console, Parser


def add_arguments(parser: Parser) -> None:
    """See `mtrain status --help`."""
    parser.add_argument("run", metavar="RUN", help="a run folder, or the number of a Slurm job")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Look at the run's files and its scheduler, and print."""
    folder, job = run_of(arguments.run)
    status = run_status(folder, job)
    facts = {"run": str(folder), "job": asdict(job) if job is not None else None, **asdict(status)}
    console.result("\n".join([f"{folder}: {status.condition}, {_progress(status)}", *_lines(job, status)]), facts)


def _progress(status: RunStatus) -> str:
    of = f" of {status.steps:,}" if status.steps is not None else ""
    loss = f", loss {status.loss:.4f}" if status.loss is not None else ""
    runs = status.condition == "running" and status.tokens_per_s is not None
    return f"step {status.step:,}{of}{loss}" + (f", {status.tokens_per_s:,.0f} tokens/s" if runs else "")


def _lines(job: RunJob | None, status: RunStatus) -> list[str]:
    lines = []
    if (slurm := status.slurm) is not None and job is not None:
        where = f"on {slurm.nodes}, {slurm.time_left} left" if slurm.nodes else slurm.reason
        lines.append(f"Slurm job {job.id}: {slurm.state} {where}, {_counted(status.restarts)}")
    elif job is not None:
        place = f"Slurm job {job.id}" if job.engine == "slurm" else f"process {job.id} on {job.host}"
        lines.append(f"{place}, {_counted(status.restarts)}")
    elif status.holder is not None:
        lines.append(f"{status.holder} trains there")
    if status.end is not None and status.end.code:
        lines.append(f"the last attempt that ended: exit code {status.end.code}, {status.end.who}")
        lines += textwrap.indent(status.end.message, "  ").splitlines()
    if job is not None:
        lines.append(f"log: {job.log}")
    return lines


def _counted(restarts: int) -> str:
    return counted(restarts, "restart")
