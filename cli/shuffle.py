"""Write all documents of a corpus in random order, in bounded memory and two passes.

The result is PREFIX_document.*; every document keeps its file and row. The disk must have room for the corpus twice:
for the result, and for temporary hidden files.

Examples:
  mdata shuffle web_text_document.json --output mixed
  mdata shuffle web_text_document.json --output again --seed 1
"""

from __future__ import annotations

import argparse

from mdata.rewriting.shuffle import shuffle

from .console import Console, Parser
from .text import written_corpora


def add_arguments(parser: Parser) -> None:
    """The corpus, the seed and where the result goes."""
    add = parser.add_argument
    add("corpus", metavar="CORPUS", help="its manifest or prefix")
    add("--output", required=True, metavar="PREFIX", help="the result is PREFIX_document.*")
    add("--seed", type=int, default=0, metavar="S", help="random seed of the order (default: 0)")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `shuffle` and print what was written."""
    with console.progress() as progress:
        prefix, made = shuffle(arguments.corpus, arguments.output, seed=arguments.seed, progress=progress)
    console.result(*written_corpora({prefix: made}))
