"""Print the last lines that the ranks of a launched run printed, in all attempts.

RUN is the folder of a run that mtrain launch started, or the number of its Slurm job.

Examples:
  mtrain tail runs/first
  mtrain tail runs/first --lines 100 --follow
"""

from __future__ import annotations

import argparse

from mdata.errors import UsageError
from trainer.launching.run_status import is_active, run_of

from .console import Console, Parser
from .tail import print_logs

_ASK_SLURM_EVERY_S = 10.0  # its controller serves the whole site


def add_arguments(parser: Parser) -> None:
    """See `mtrain tail --help`."""
    parser.add_argument("run", metavar="RUN", help="a run folder, or the number of a Slurm job")
    parser.add_argument("--lines", type=int, default=20, metavar="N", help="lines to print (default: 20)")
    parser.add_argument("--follow", action="store_true", help="keep printing until the run ends")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Print, and continue with --follow."""
    folder, job = run_of(arguments.run)
    if job is None:
        raise UsageError(
            f"{folder} was not started by mtrain launch, so it has no log",
            fix=f"see the output of mtrain train, or {folder}/events.jsonl",
        )
    print_logs(
        console,
        lambda: [job.log],
        lines=arguments.lines,
        ended=lambda: not arguments.follow or not is_active(job),
        ask_every_s=_ASK_SLURM_EVERY_S if job.engine == "slurm" else 0.0,
    )
