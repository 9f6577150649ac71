"""List the types of tokenizers and their engines, and measure the engines on this machine.

Unless you name a tokenizer, small ones of each kind are trained first on the sources of Python's standard library,
which are also the text to measure (one thread). Every engine with a speed gave the same ids as the exact engine. `mdata
preprocess` uses the first one listed.

Examples:
  mdata tokenizers
  mdata tokenizers --tokenizer-type HuggingFaceTokenizer --tokenizer-model tok
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from mdata.tokenizers.base.tokenizer import TokenizerSpec

from .console import Console
from .text import table
from .tokenizer_options import add_tokenizer, add_variants, spec_of

if TYPE_CHECKING:
    from mdata.tokenizer_training.tokenizer_benchmark import Measured, TypeFacts

_TEXT = "sources of this Python's standard library"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that name a tokenizer."""
    group = parser.add_argument_group("tokenizer to measure (default: small ones, trained here)")
    add_tokenizer(group, required=False)
    add_variants(group)


def main(arguments: argparse.Namespace, console: Console) -> None:
    """List, measure, print."""
    from mdata.tokenizer_training.tokenizer_benchmark import (
        SMALL_VOCABULARY,
        TYPES,
        engine_versions,
        measure,
        train_small_tokenizers,
    )

    # One thread, like a worker process of mdata preprocess.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if arguments.tokenizer_type is None:
        with tempfile.TemporaryDirectory() as folder:
            measured = [(form, spec.type, measure(spec)) for form, spec in train_small_tokenizers(Path(folder))]
        name = f"vocabularies of {SMALL_VOCABULARY:,} entries trained here"
    else:
        name = arguments.tokenizer_type
        measured = [(name, name, measure(_named(arguments, console)))]
    versions = engine_versions()
    console.result(
        _as_text(TYPES, versions, measured=measured, name=name),
        {
            "types": {type: list(facts.engines) for type, facts in TYPES.items()},
            "needs": {type: facts.needs for type, facts in TYPES.items()},
            "engines": versions,
            "tokenizer": name,
            "text": _TEXT,
            "measured": [
                {"form": form, "type": type, **asdict(result)} for form, type, many in measured for result in many
            ],
        },
    )


def _named(arguments: argparse.Namespace, console: Console) -> TokenizerSpec:
    """The tokenizer that the options name; a note names options that change nothing for it."""
    spec, unused = spec_of(arguments)
    for option in unused:
        console.note(f"mdata: {option} has no effect for {arguments.tokenizer_type}")
    return spec


def _as_text(
    types: Mapping[str, TypeFacts],
    versions: Mapping[str, str | None],
    *,
    measured: Sequence[tuple[str, str, Sequence[Measured]]],
    name: str,
) -> str:
    kinds = [[type, facts.needs, ", ".join(facts.engines) or "needs none"] for type, facts in types.items()]
    engines = [[engine, version or "not installed"] for engine, version in versions.items()]
    rows = [
        [form, result.engine, result.mb_per_s, result.load_s, result.why_not or ""]
        for form, _, many in measured
        for result in many
    ]
    parts = (
        table(("type", "needs", "engines; the fastest that gives the exact ids is used"), kinds),
        table(("engine", "version"), engines),
        f"{name}, one thread, {_TEXT}",
        table(("form", "engine", "MB/s", "load s", "why not"), rows),
    )
    return "\n\n".join(parts[:3]) + "\n" + parts[3]
