"""Skip samples of a run: do not train on the given steps or samples.

The range is recorded in RUN/data.json and events.jsonl, and applies from the next start of the run on. Skipped samples
keep their place in the order: their steps are counted, but change nothing. Training that has already happened is not
undone; for that, continue from the older checkpoint that the output names. With --undo, the run trains on the samples
after all; that is refused for steps that were already done without them.

Examples:
  mtrain skip runs/first --steps 12300-12350
  mtrain skip runs/first --samples 3148800-3161855 --undo
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from mdata.errors import UsageError

from .console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `mtrain skip --help`."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="a run folder written by mtrain train")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--steps", metavar="A-B", help="steps A to B, as in metrics.jsonl; or a single step")
    given.add_argument(
        "--samples", metavar="A-B", help="samples A to B of the run's order, counted from 0; or a single sample"
    )
    parser.add_argument("--undo", action="store_true", help="train on them after all")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Record the samples, and report the effect."""
    from trainer.run.skipping import skip, undo

    unit, text = ("steps", arguments.steps) if arguments.steps is not None else ("samples", arguments.samples)
    match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UsageError(
            f"--{unit} {text} is not a range", expected="A-B with A <= B, such as 12300-12350, or one number"
        )
    first, last = int(match[1]), int(match[2] or match[1])
    result = (undo if arguments.undo else skip)(arguments.run_folder, **{unit: (first, last)})
    console.result(result.text(), result.facts())
