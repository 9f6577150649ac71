"""Draw documents of a corpus at random until they have N tokens, and write them as a corpus, in their order.

The result is PREFIX_document.*. A larger sample of the same seed contains the smaller one; every document keeps its
file and row.

Examples:
  mdata sample web_text_document.json --output small --tokens 1e9
  mdata sample web_text_document.json --output other --tokens 1e9 --seed 1
"""

from __future__ import annotations

import argparse

from mdata.rewriting.subsets import sample

from .console import Console, Parser
from .text import count, written_corpora


def add_arguments(parser: Parser) -> None:
    """The corpus, how much of it, and where the result goes."""
    add = parser.add_argument
    add("corpus", metavar="CORPUS", help="its manifest or prefix")
    add("--output", required=True, metavar="PREFIX", help="the result is PREFIX_document.*")
    add("--tokens", type=count, required=True, metavar="N", help="at least this many; the last document may exceed it")
    add("--seed", type=int, default=0, metavar="S", help="random seed of the draw (default: 0)")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `sample` and print what was written."""
    with console.progress() as progress:
        prefix, made = sample(
            arguments.corpus,
            arguments.output,
            tokens=arguments.tokens,
            seed=arguments.seed,
            progress=progress,
        )
    console.result(*written_corpora({prefix: made}))
