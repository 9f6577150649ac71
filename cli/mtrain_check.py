"""Print every problem of a run's configuration at once, with its data and its mesh, and start nothing.

Exit code 0: the run can start. 2: it cannot; each problem says which values clash and what to change.
"""

from __future__ import annotations

import argparse

from cli.console import Console, Parser
from cli.mtrain_options import add_run_arguments, read_run_arguments


def add_arguments(parser: Parser) -> None:
    """See `mtrain check --help`."""
    add_run_arguments(parser)


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Check, and raise what was found."""
    from trainer.config import problems_error
    from trainer.launch import run_problems

    config, world_size = read_run_arguments(arguments)
    problems = run_problems(config, world_size)
    facts = {"config": arguments.config, "world_size": world_size, "problems": problems}
    if problems and not console.json:
        raise problems_error(arguments.config, problems)
    console.result(f"{arguments.config}: no problems with --nproc {world_size}", facts)
    return 2 if problems else 0
