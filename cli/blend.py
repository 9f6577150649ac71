"""Mix corpora by shares: mdata blend 0.7 code_text_document.json 0.3 prose_text_document.json -o mix.json

The words are Megatron's: WEIGHT CORPUS WEIGHT CORPUS ..., or corpora alone, which then count by their tokens.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

import mdata
from cli.console import Console
from cli.text import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Few flags."""
    add = parser.add_argument
    add("words", nargs="+", metavar="WORD", help="weights and corpora (manifests, or prefixes of .bin/.idx)")
    add("-o", "--output", required=True, metavar="MIX.json", help="the blend manifest")
    add("--tokens", type=int, metavar="N", help="length of a training, to show how often each corpus is read")
    add("--samples", type=int, metavar="N", help="the same in samples; needs --sequence-length")
    add("--sequence-length", type=int, metavar="S", help="tokens of a sample")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `mdata.make_blend` and show the mixture."""
    total = _total_tokens(arguments)
    blend = mdata.make_blend(arguments.words, arguments.output)
    rows = mdata.blend_table(blend, total)
    header = ["component", "share", "achieved", "tokens", "documents"]
    cells = [[row.name, row.share, row.achieved, row.tokens, row.documents] for row in rows]
    if total is not None:
        header.append("epochs")
        cells = [[*line, row.epochs] for line, row in zip(cells, rows, strict=True)]
    facts = {"manifest": arguments.output, "id": blend.manifest.id, "components": [asdict(row) for row in rows]}
    console.result(f"{table(header, cells)}\n{arguments.output}: blend {blend.manifest.id[:16]}", facts)


def _total_tokens(arguments: argparse.Namespace) -> int | None:
    if arguments.samples is None:
        return int(arguments.tokens) if arguments.tokens is not None else None
    if arguments.tokens is not None or arguments.sequence_length is None:
        raise mdata.UsageError("--samples goes with --sequence-length and without --tokens")
    return int(arguments.samples * arguments.sequence_length)
