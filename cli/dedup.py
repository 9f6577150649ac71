"""Find documents that repeat earlier ones, exactly or nearly, without copying any text.

Near-duplicates share words: with the default 14 bands of 8 values, documents that have 80 % of their 5-grams in common
are found with a probability of 92 %. The first document of each group stays. The folder names the rows of the others,
which mdata preprocess --skip-rows leaves out. An interrupted command continues.

Examples:
  mdata dedup --input web.jsonl --output web-repeats
  mdata dedup --input code.jsonl --against web.jsonl --bands 20 --rows 5 --output code-repeats
"""

from __future__ import annotations

import argparse

from mdata import UsageError
from mdata.dedup.dedup import DedupOptions, dedup

from .console import Console, Parser


def add_arguments(parser: Parser) -> None:
    """Input, output and how similar documents are found."""
    add = parser.add_argument
    add("--input", required=True, nargs="+", metavar="PATH", help="files, folders or patterns, as for preprocess")
    add("--output", required=True, metavar="FOLDER", help="where the rows to leave out are written")
    add("--against", nargs="+", default=(), metavar="PATH", help="texts that stay: what repeats them is removed")
    add("--include", nargs="+", default=(), metavar="PATTERN", help="read only these files of folders")
    add("--exclude", nargs="+", default=(), metavar="PATTERN", help="do not read these files of folders")
    add("--json-key", default="text", metavar="KEY", help="key or column of the text (default: text)")
    add("--exact", action="store_true", help="find equal documents only: equal words, whatever their case and accents")
    add("--bands", type=int, metavar="B", help="bands of a signature; more find less similar documents (default: 14)")
    add("--rows", type=int, default=8, metavar="R", help="values of a band; more find fewer documents (default: 8)")
    add("--ngram", type=int, default=5, metavar="N", help="words of an n-gram (default: 5)")
    add("--workers", type=int, default=0, metavar="W", help="threads (default: all cores)")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `dedup` and print what was found."""
    if arguments.exact and arguments.bands is not None:
        raise UsageError("--exact compares no bands", fix="leave --exact or --bands out")
    bands = 0 if arguments.exact else 14 if arguments.bands is None else arguments.bands
    names = ("input", "output", "against", "json_key", "rows", "ngram", "workers")
    options = DedupOptions(
        **{name: getattr(arguments, name) for name in names},
        include=tuple(arguments.include),
        exclude=tuple(arguments.exclude),
        bands=bands,
    )
    with console.progress() as progress:
        result = dedup(options, progress)
    share = 100 * result.removed / max(1, result.rows)
    text = (
        f"{result.removed:,} of {result.rows:,} rows ({share:.2f} %) repeat earlier ones, {result.exact:,} of them "
        f"exactly; groups: {result.clusters:,}\nnext: mdata preprocess --skip-rows {result.folder} ..."
    )
    facts = {name: getattr(result, name) for name in ("rows", "removed", "exact", "clusters")}
    console.result(text, {"folder": str(result.folder), **facts})
