"""Learn a byte-level BPE vocabulary from jsonl text and write it as a Hugging Face folder.

The folder then serves as: mdata preprocess --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER
"""

from __future__ import annotations

import argparse

import mdata
from cli.console import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Few flags."""
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files, folders or quoted patterns of jsonl")
    add("--vocab-size", type=int, required=True, metavar="N", help="entries, <|endoftext|> and 256 bytes among them")
    add("--output", required=True, metavar="FOLDER", help="where tokenizer.json goes")
    add("--json-keys", "--json-key", nargs="+", default=["text"], metavar="KEY", help="default: text")


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `mdata.train_tokenizer` and say what was learnt."""
    with console.progress() as progress:
        tokenizer = mdata.train_tokenizer(
            arguments.input,
            arguments.output,
            vocab_size=arguments.vocab_size,
            json_keys=tuple(arguments.json_keys),
            progress=progress,
        )
    if tokenizer.vocab_size < arguments.vocab_size:
        console.note(f"mdata: the text gives only {tokenizer.vocab_size} entries, fewer than asked for")
    console.result(
        f"{arguments.output}: {tokenizer.vocab_size:,} entries, end of document {tokenizer.eod}",
        {
            "folder": arguments.output,
            "vocab_size": tokenizer.vocab_size,
            "eod": tokenizer.eod,
            "fingerprint": tokenizer.fingerprint,
        },
    )
