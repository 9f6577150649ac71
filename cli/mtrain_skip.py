"""Leave samples out of a run: record that steps, or ranges of samples, are not trained on.

The decision is recorded in RUN/data.json and in events.jsonl, and applies from the next start of the run on, for good.
The samples keep their place in the order: their steps are counted, but change nothing. What the newest checkpoint has
been trained on already is not undone; the answer says from which checkpoint to continue for that.

Examples:
  mtrain skip runs/first --steps 12300-12350
  mtrain skip runs/first --samples 3148800-3161855
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
    given.add_argument("--steps", metavar="A-B", help="steps A to B, as metrics.jsonl counts them; or one step")
    given.add_argument("--samples", metavar="A-B", help="samples A to B of the run's order, from 0; or one sample")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Record the samples, and say what that changes."""
    from trainer.run.skipping import skip

    what, text = ("steps", arguments.steps) if arguments.steps is not None else ("samples", arguments.samples)
    match = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", text)
    if match is None or int(match[2] or match[1]) < int(match[1]):
        raise UsageError(f"--{what} {text} is no range", expected="A-B with A <= B, such as 12300-12350, or one number")
    first, last = int(match[1]), int(match[2] or match[1])
    result = skip(arguments.run_folder, **{what: (first, last)})
    console.result(result.text(), result.facts())
