"""Turn lines of JSON into Megatron-format token files, with the options of Megatron's preprocess_data.py.

For each key the results are PREFIX_KEY_document.bin, .idx and .json (the manifest). They do not depend on
--workers.
"""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

import mdata
from cli.console import Console
from cli.text import table
from mdata.preprocess import usable_cores

# Options of Megatron's tool that change what is written and are not here yet: refused by name, never ignored.
_NOT_HERE = (
    "--split-sentences",
    "--keep-newlines",
    "--lang",
    "--partitions",
    "--keep-sequential-samples",
    "--find-optimal-num-workers",
    "--workers-to-check",
    "--max-documents",
    "--vocab-file",
    "--merge-file",
    "--vocab-size",
    "--tokenizer-special-tokens",
    "--tokenizer-metadata",
    "--tokenizer-sentencepiece-legacy",
    "--tiktoken-pattern",
    "--tiktoken-num-special-tokens",
    "--null-tokenizer-eod-id",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Megatron's names."""
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files, folders or quoted patterns of jsonl")
    add("--output-prefix", required=True, metavar="PREFIX", help="results are PREFIX_KEY_document.*")
    add("--json-keys", "--json-key", nargs="+", default=["text"], metavar="KEY", help="default: text")
    add("--tokenizer-type", required=True, metavar="TYPE", help="HuggingFaceTokenizer")
    add("--tokenizer-model", required=True, metavar="PATH", help="folder with tokenizer.json, or that file")
    add("--tokenizer-hf-no-include-special-tokens", action="store_true", help="leave out BOS, CLS and the like")
    add("--append-eod", action="store_true", help="put the end-of-document id after each document")
    add("--workers", type=int, default=usable_cores(), metavar="N", help="default: the cores you may use")
    add("--log-interval", type=int, metavar="N", help="accepted; progress shows by itself")
    for name in _NOT_HERE:
        add(name, action=_Refuse)


def main(arguments: argparse.Namespace, console: Console) -> None:
    """Run `mdata.preprocess` and say what was made."""
    options = mdata.PreprocessOptions(
        input=tuple(arguments.input),
        output_prefix=arguments.output_prefix,
        tokenizer_type=arguments.tokenizer_type,
        tokenizer_model=arguments.tokenizer_model,
        tokenizer_options=tokenizer_options(arguments),
        json_keys=tuple(arguments.json_keys),
        append_eod=arguments.append_eod,
        workers=arguments.workers,
    )
    with console.progress() as progress:
        result = mdata.preprocess(options, progress)
    rows = []
    for key, manifest in result.manifests.items():
        (shard,) = manifest.shards
        rows.append((str(result.paths[key]), shard.documents, shard.sequences, shard.tokens, manifest.dtype))
    text = table(("corpus", "documents", "sequences", "tokens", "type"), rows)
    facts = [
        {"manifest": path, "id": manifest.id, "documents": documents, "sequences": sequences, "tokens": tokens}
        for (path, documents, sequences, tokens, _), manifest in zip(rows, result.manifests.values(), strict=True)
    ]
    console.result(text, {"corpora": facts})


def tokenizer_options(arguments: argparse.Namespace) -> tuple[tuple[str, Any], ...]:
    """The options that belong to the tokenizer's type."""
    if arguments.tokenizer_hf_no_include_special_tokens:
        return (("include_special_tokens", False),)
    return ()


class _Refuse(argparse.Action):
    """An option of Megatron's tool that is known and not here."""

    def __init__(self, option_strings: list[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs="*", help=argparse.SUPPRESS)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> NoReturn:
        """Refuse, by name."""
        raise mdata.UsageError(f"{option_string} is not in this version of mdata", fix="leave it out")
