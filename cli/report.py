"""Describe a blend, a corpus or a bare .bin/.idx pair in one HTML page: mdata report mix.json

Shows shares over training, epochs of each component, document lengths, use of the vocabulary, and records left out. The
page needs no network and runs no scripts. Without a length, the training is assumed to read as many tokens as the
corpora have. Of a folder of mdata dedup: what was removed, with examples side by side.

Examples:
  mdata report mix.json
  mdata report mix.json --tokens 1e9 --sequence-length 4096 -o mix.html
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import mdata
from mdata.reporting.dedup_report import is_dedup_folder, report_dedup
from mdata.tracing.run_folder import is_run

from .console import Console
from .text import add_allow_outside, add_training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The data to draw, the training, and the output."""
    add = parser.add_argument
    add("path", metavar="MIX.json", help="a manifest, the prefix of a .bin/.idx pair, or a folder of mdata dedup")
    add("-o", "--output", metavar="FILE.html", help="the page to write (default: MIX.report.html next to the manifest)")
    add("--full", action="store_true", help="count all tokens, not a sample of 67 million")
    add_allow_outside(parser)
    add_training(parser, "the training that the report describes")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Write the page and print its path."""
    if arguments.samples is not None and (arguments.tokens is not None or arguments.sequence_length is None):
        raise mdata.UsageError("--samples needs --sequence-length and excludes --tokens")
    if is_dedup_folder(arguments.path):
        page = report_dedup(arguments.path, arguments.output)
        console.result(f"{page.path}: report of what was removed", {**page.facts, "page": str(page.path)})
        return
    is_folder = os.path.isdir(arguments.path)  # noqa: PTH112 - False for a path that is too long
    counts = sorted(Path(arguments.path).glob("*.report")) if is_folder else []
    if counts:
        raise mdata.UsageError(
            f"{arguments.path} holds the texts of mdata {counts[0].stem}, no tokens",
            fix=f"what was removed is counted in {counts[0]}; for tokens, mdata preprocess --input {arguments.path}",
        )
    if is_run(arguments.path):
        raise mdata.UsageError(f"{arguments.path} is a run folder", fix=f"mtrain report {arguments.path}")
    made = mdata.report(
        arguments.path,
        arguments.output,
        sequence_length=arguments.sequence_length,
        samples=arguments.samples,
        tokens=arguments.tokens,
        split=arguments.split_shares,
        full=arguments.full,
        allow_outside=arguments.allow_outside,
    )
    if made.data.problem:
        console.note(f"mdata: shares over training are left out: {made.data.problem}")
    console.result(f"{made.path}: report of {made.data.title}", {**made.facts, "page": str(made.path)})
