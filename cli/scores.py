"""Print statistics of scores that a program gave to texts, such as their toxicity: of all texts, and by prompt.

The lines are those of `mdata filter --by`. If they have a `prompt`, the expected maximum over its texts and the share
of prompts with a text above 0.5 are printed, too (Gehman et al. 2020); with --prompts also for prompts that are above
0.5 themselves, and for the rest.

Examples:
  mdata scores quality.jsonl --score edu
  mdata scores scores.jsonl --prompts rated_prompts.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from mdata.cleaning.scores import THRESHOLD, maxima, read_prompts, read_scores, statistics
from mdata.errors import counted

from .console import Console, Parser


def add_arguments(parser: Parser) -> None:
    """The scores, and those of the prompts."""
    parser.add_argument("scores", metavar="FILE", help="scores, as lines of JSON")
    parser.add_argument("--score", default="", metavar="NAME", help="which score of a line, if it has several")
    parser.add_argument(
        "--prompts", metavar="FILE", help='scores of the prompts, as lines {"prompt": {"text": ..., "toxicity": ...}}'
    )


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Read, and print."""
    scores = read_scores(arguments.scores, arguments.score, of_prompts=arguments.prompts is not None)
    prompts = read_prompts(arguments.prompts, arguments.score) if arguments.prompts else None
    values = [line.score for line in scores if line.score is not None]
    facts: dict[str, Any] = {"lines": len(scores), "all": statistics(values)}
    lines = [
        f"{counted(len(scores), 'line')}, {len(scores) - len(values):,} without a score",
        sentence("scores", facts["all"]),
    ]
    if any(line.prompt for line in scores):
        facts["prompts"] = maxima(scores, prompts)
        for name, group in facts["prompts"].items():
            if group["prompts"]:
                which = {"all": "all prompts", "prompts above": f"prompts above {THRESHOLD:g}"}.get(
                    name, "other prompts"
                )
                lines.append(
                    f"{which}: {group['prompts']:,}, expected maximum {group['expected_maximum']:.4f} +- "
                    f"{group['std']:.4f}; {group['probability']:.1%} have a text above {THRESHOLD:g}"
                )
    console.result("\n".join(lines), facts)


def sentence(name: str, facts: Mapping[str, Any]) -> str:
    """Statistics in words."""
    if not facts["count"]:
        return f"{name}: none"
    spread = f"{facts['mean']:.4f} +- {facts['std']:.4f}, {facts['min']:.4f} to {facts['max']:.4f}"
    return f"{name}: {facts['count']:,}, mean {spread}; {facts['above']:.1%} above {THRESHOLD:g}"
