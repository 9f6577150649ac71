"""Keep the rows with the lowest or highest scores that another program gave them.

A line of --by has the id of a row, or its index as `mtrain generate` writes it, and its score: {"id": 7, "score":
{"toxicity": 0.1}}, or a number, or null. --keep-lowest 0.5 keeps half as many rows as there are lines, those with the
lowest scores; rows without a score are left out. The output folder gets a file of JSON lines for each input file. An
interrupted command continues.

Examples:
  mdata filter --input samples.jsonl --by scores.jsonl --keep-lowest 0.5 --output kept
  mdata filter --input samples.jsonl --by quality.jsonl --keep-highest 0.1 --score edu --output best
"""

from __future__ import annotations

import argparse

from mdata.cleaning.scores import FilterRules, filter_by_scores
from mdata.errors import counted

from .console import Console, Parser
from .scores import sentence
from .text_job_options import add_text_job, facts_of, text_job_of, text_of


def add_arguments(parser: Parser) -> None:
    """Input, output, and which rows stay."""
    add_text_job(parser)
    add = parser.add_argument
    add("--by", required=True, metavar="FILE", help="scores, as lines of JSON")
    add("--score", default="", metavar="NAME", help="which score of a line, if it has several")
    share = parser.add_mutually_exclusive_group(required=True)
    share.add_argument(
        "--keep-lowest", metavar="SHARE", help="share of the lines of --by with the lowest scores, such as 0.5"
    )
    share.add_argument("--keep-highest", metavar="SHARE", help="the same with the highest scores")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Filter, and print what stays."""
    highest = arguments.keep_lowest is None
    share = arguments.keep_highest if highest else arguments.keep_lowest
    rules = FilterRules(by=arguments.by, share=share, name=arguments.score, highest=highest)
    with console.progress(continues=True) as progress:
        result = filter_by_scores(text_job_of(arguments), rules, progress)
    facts = dict(result.summary)
    lines = [text_of(result, rows_only=arguments.rows_only)]
    lines += [sentence(f"scores, {name}", facts[name]) for name in ("all", "kept")]
    if without_row := facts["without_row"] if arguments.shard is None else 0:
        lines.append(f"{counted(without_row, 'line')} of {arguments.by} with an id that no row has")
    console.result("\n".join(lines), {**facts_of(result), "scores": facts})
