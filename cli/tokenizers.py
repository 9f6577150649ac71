"""List the types of tokenizers and their engines, and measure the engines on this machine.

Without a tokenizer a small one is learnt on the spot, from the sources of Python's standard library; they are
also the text that is measured, on one thread. Engines that are listed with a speed give exactly the ids of the
exact engine, which is compared before they are taken; `mdata preprocess` takes the first of them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mdata
from cli.console import Console
from cli.text import table
from cli.tokenizer_options import add_tokenizer, add_variants, tokenizer_options_of

if TYPE_CHECKING:
    from mdata.tokenizers.speed import Measured

_TEXT = "sources of this Python's standard library"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that name a tokenizer."""
    group = parser.add_argument_group("tokenizer to measure; default: a small one, learnt here")
    add_tokenizer(group, required=False)
    add_variants(group)


def main(arguments: argparse.Namespace, console: Console) -> None:
    """List, measure, print."""
    from mdata.tokenizers.speed import engine_versions, engines_of_types, learnt_here, measure

    # One thread, as a worker process of mdata preprocess works.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if arguments.tokenizer_type is None:
        with tempfile.TemporaryDirectory() as folder:
            measured = measure(learnt_here(Path(folder)))
        name = "a vocabulary of 4,096 entries learnt here"
    else:
        options, unused = tokenizer_options_of(arguments)
        for option in unused:
            console.note(f"mdata: {option} changes nothing for {arguments.tokenizer_type}")
        name = arguments.tokenizer_type
        measured = measure(
            mdata.TokenizerSpec(
                type=name,
                model=arguments.tokenizer_model,
                vocab_file=arguments.vocab_file,
                merge_file=arguments.merge_file,
                options=options,
            )
        )
    versions = engine_versions()
    types = engines_of_types()
    console.result(
        _as_text(types, versions, measured=measured, name=name),
        {
            "types": {type: list(engines) for type, engines in types.items()},
            "engines": versions,
            "tokenizer": name,
            "text": _TEXT,
            "measured": [asdict(one) for one in measured],
        },
    )


def _as_text(types: dict[str, Any], versions: dict[str, str | None], *, measured: Sequence[Measured], name: str) -> str:
    kinds = [[type, ", ".join(engines) or "needs none"] for type, engines in types.items()]
    engines = [[engine, version or "not installed"] for engine, version in versions.items()]
    rows = [[one.engine, one.mb_per_s, one.load_s, one.why_not or ""] for one in measured]
    parts = (
        table(("type", "engines, the fastest that is equal is taken"), kinds),
        table(("engine", "version"), engines),
        f"{name}, one thread, {_TEXT}",
        table(("engine", "MB/s", "load s", "why not"), rows),
    )
    return "\n\n".join(parts[:3]) + "\n" + parts[3]
