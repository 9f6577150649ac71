"""Find the texts of test sets in training texts by exact n-grams of words, and take them out.

Words are compared without case and punctuation. A test item of 13 words or more gives all its n-grams of 13 words, one
of 8 to 12 words is one n-gram. Texts that have one are dropped, split around the passage, or only reported. The report
says for each test set how many of its items were found, and in how many rows.

Examples:
  mdata decontaminate --input web.jsonl --against gsm8k.jsonl --against-keys question --mode report --output found
  mdata decontaminate --input web.jsonl --against hella=eval.jsonl --mode split --output pieces --removed fallen.jsonl
"""

from __future__ import annotations

import argparse

from mdata.cleaning.decontaminate import DecontaminateRules, decontaminate, decontaminate_work, join_parts
from mdata.cleaning.text_job import TextJobOptions, TextWork
from mdata.errors import UsageError, counted

from .console import Console, Parser
from .text_job_options import add_text_job, facts_of, text_job_of, text_of

_NAMES = ("ngram", "min_ngram", "mode", "margin", "min_characters", "max_pieces", "compat", "key_threshold")


def add_arguments(parser: Parser) -> None:
    """Input, output, test sets and what happens to texts that match."""
    add_text_job(parser)
    add = parser.add_argument
    default = DecontaminateRules(against=("",))
    add("--against", required=True, nargs="+", metavar="FILE", help="test sets, each as FILE or NAME=FILE")
    add(
        "--against-keys", nargs="+", default=default.against_keys, metavar="KEY", help="keys of an item (default: text)"
    )
    add("--mode", choices=("report", "drop", "split"), default=default.mode, help="(default: drop)")
    add("--ngram", type=int, default=default.ngram, metavar="N", help="words of an n-gram (default: 13)")
    add("--min-ngram", type=int, default=default.min_ngram, metavar="N", help="words of a shorter item (default: 8)")
    add("--margin", type=int, default=default.margin, metavar="N", help="characters cut on each side (default: 200)")
    pieces = "pieces of at most so many characters fall (default: 200)"
    add("--min-characters", type=int, default=default.min_characters, metavar="N", help=pieces)
    more = "texts in more pieces fall (default: 10)"
    add("--max-pieces", type=int, default=default.max_pieces, metavar="N", help=more)
    add("--compat", choices=("openwebtext",), help="the bytes of Megatron-LM's filter_ngrams.py, with --mode split")
    frequent = "--compat: n-grams in so many texts stay (default: 10)"
    add("--key-threshold", type=int, default=default.key_threshold, metavar="N", help=frequent)
    add("--parts", type=int, metavar="N", help="only join the reports of N finished parts, as mdata launch does last")


def _rules_of(arguments: argparse.Namespace) -> DecontaminateRules:
    return DecontaminateRules(
        against=tuple(arguments.against),
        against_keys=tuple(arguments.against_keys),
        **{name: getattr(arguments, name) for name in _NAMES},
    )


def work_of(arguments: argparse.Namespace) -> tuple[TextJobOptions, TextWork]:
    """The options and the work, for `mdata launch`."""
    if arguments.parts is not None:
        raise UsageError("the launcher joins the reports of the parts", fix="leave --parts of decontaminate out")
    options = text_job_of(arguments)
    return options, decontaminate_work(options, _rules_of(arguments), in_parts=True)


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `decontaminate` and print what was found of each test set."""
    options, rules = text_job_of(arguments), _rules_of(arguments)
    with console.progress(continues=True) as progress:
        if arguments.parts is None:
            result = decontaminate(options, rules, progress)
        else:
            result = join_parts(options, rules, arguments.parts, progress)
    sets = result.summary.get("sets", [])
    lines = []
    for facts in sets:
        share = f"{facts['found']:,} of {counted(facts['items'], 'item')} ({100 * facts['share']:.2f} %)"
        lines.append(f"{facts['name']}: {share} in {counted(facts['rows'], 'row')}")
    if rules.mode != "report":
        lines.append(text_of(result, rows_only=options.rows_only))
    console.result("\n".join(lines), facts_of(result) | {"sets": sets})
