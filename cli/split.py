"""Divide the documents of a corpus, in their order, into several corpora by shares of the tokens.

The results are PREFIX_NAME_document.*; every document keeps its file and row.

Examples:
  mdata split web_text_document.json --output set --shares 98 1 1 --names train valid test
  mdata split web_text_document.json --output half --shares 1 1
"""

from __future__ import annotations

import argparse

from mdata.rewriting.subsets import split

from .console import Console, Parser
from .text import written_corpora


def add_arguments(parser: Parser) -> None:
    """The corpus, the shares and where the results go."""
    add = parser.add_argument
    add("corpus", metavar="CORPUS", help="its manifest or prefix")
    add("--output", required=True, metavar="PREFIX", help="results are PREFIX_NAME_document.*")
    add("--shares", nargs="+", required=True, metavar="N", help="shares of the tokens, such as 98 1 1")
    add("--names", nargs="+", metavar="NAME", help="one per share, such as train valid test (default: 1 2 ...)")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `split` and print what was written."""
    with console.progress() as progress:
        made = split(
            arguments.corpus,
            arguments.output,
            shares=arguments.shares,
            names=arguments.names,
            progress=progress,
        )
    console.result(*written_corpora(made))
