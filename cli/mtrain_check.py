"""Print every problem of a run's configuration at once, with its data, its mesh and its newest checkpoint.

Nothing is started or written. Exit code 0: the run can start; where it goes on from a checkpoint, that and the
settings that are no longer the checkpoint's are named. 2: it cannot; each problem says which values clash and what
to change. 4: the data or the checkpoint is damaged.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cli.console import Console, Parser
from cli.mtrain_options import add_run_arguments, read_run_arguments

if TYPE_CHECKING:
    from trainer.run.resume import Start


def add_arguments(parser: Parser) -> None:
    """See `mtrain check --help`."""
    add_run_arguments(parser)


def main(arguments: argparse.Namespace, console: Console) -> int:
    """Check, and raise what was found."""
    from trainer.config.parse import problems_error
    from trainer.run.launch import survey

    config, world_size = read_run_arguments(arguments)
    found = survey(config, world_size)
    if found.problems and not console.json:
        raise problems_error(arguments.config, found.problems)
    facts = {"config": arguments.config, "world_size": world_size, "problems": found.problems}
    lines = [f"{arguments.config}: no problems with --nproc {world_size}"]
    if found.start:
        facts |= start_facts(found.start)
        lines += start_lines(found.start)
    console.result("\n".join(lines), facts)
    return 2 if found.problems else 0


def start_lines(start: Start) -> list[str]:
    """Where the run goes on, and what is not as it was, for people."""
    from trainer.plan.lengths import given_lengths, run_length

    if start.folder is None:
        return []
    done = start.done
    steps = run_length(start.config, steps=done.steps, samples=done.samples).steps
    if done.steps >= steps:
        ((unit, amount),) = given_lengths(start.config.train).items()
        return [f"nothing is left to do: {start.folder} is at step {done.steps} of train.{unit}={amount}"]
    return [f"continues from {start.folder}; {done.steps} of {steps} steps are done", *start.notes]


def start_facts(start: Start) -> dict[str, object]:
    """The same as JSON types."""
    return {
        "checkpoint": str(start.folder) if start.folder else None,
        "step": start.done.steps,
        "changed": {name: {"before": before, "now": now} for name, (before, now) in start.changes.items()},
        "notes": list(start.notes),
    }
