"""Ask a launched run to write a checkpoint and end; a job that still waits leaves the queue.

RUN is the folder of a run that mtrain launch started, or the number of its Slurm job. The ranks end after their step,
and Slurm does not start the job again. The command of mtrain launch continues the run.

Examples:
  mtrain stop runs/first
  mtrain stop 4711
"""

from __future__ import annotations

import argparse

from mdata.errors import UsageError
from mdata.util import file_lock
from trainer.launching.run_status import ask_to_stop, run_of

from .console import Console, Parser


def add_arguments(parser: Parser) -> None:
    """See `mtrain stop --help`."""
    parser.add_argument("run", metavar="RUN", help="a run folder, or the number of a Slurm job")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Ask, and return at once."""
    folder, job = run_of(arguments.run)
    if job is None:
        raise UsageError(
            f"{folder} was not started by mtrain launch",
            found=file_lock.held_by(folder / ".lock") or "no launched process",
            fix="end that process with Ctrl-C or SIGTERM; it writes a checkpoint first",
        )
    asked = ask_to_stop(job)
    said = "asked to save and end" if asked else "neither waits nor runs; nothing to stop"
    console.result(f"{folder}: {said}", {"run": str(folder), "asked": asked})
