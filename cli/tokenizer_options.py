"""The options that name a tokenizer, by Megatron's names: the same words in every command that takes one.

An option that belongs to another type than the one named changes nothing; the command tells it by name.
"""

from __future__ import annotations

import argparse
from types import MappingProxyType
from typing import Any

import mdata

# What each tokenizer type takes besides its files. A type that is not here is the loader's to refuse, by name.
_TYPE_OPTIONS = MappingProxyType(
    {
        "GPT2BPETokenizer": ("--tokenizer-special-tokens", "--special-tokens-in-text"),
        "HuggingFaceTokenizer": (
            "--tokenizer-special-tokens",
            "--tokenizer-hf-no-include-special-tokens",
            "--special-tokens-in-text",
        ),
        "NullTokenizer": ("--vocab-size", "--null-tokenizer-eod-id"),
        "ByteTokenizer": (),
    }
)


def add_tokenizer(group: argparse._ArgumentGroup, *, required: bool) -> None:
    """Megatron's options of the tokenizer."""
    add = group.add_argument
    add("--tokenizer-type", required=required, metavar="TYPE", help="see mdata tokenizers")
    add("--tokenizer-model", metavar="PATH", help="its folder or file; nothing is ever downloaded")
    add("--vocab-file", "--vocab", metavar="FILE", help="GPT2BPETokenizer: vocab.json")
    add("--merge-file", metavar="FILE", help="GPT2BPETokenizer: merges.txt")
    add("--vocab-size", type=int, metavar="N", help="NullTokenizer: entries")
    add("--null-tokenizer-eod-id", type=int, metavar="ID", help="NullTokenizer: end of document; default N - 1")
    add("--tokenizer-special-tokens", nargs="+", metavar="TOKEN", help="further special tokens")
    add("--tokenizer-hf-no-include-special-tokens", action="store_true", help="leave out BOS, CLS and the like")


def add_special_in_text(group: argparse._ArgumentGroup) -> None:
    """Ours: what a special token spelled in a text becomes."""
    group.add_argument(
        "--special-tokens-in-text",
        choices=("special", "plain"),
        default="special",
        help="whether a special token spelled in a text becomes its id (as Megatron) or stays text",
    )


def tokenizer_options_of(arguments: argparse.Namespace) -> tuple[tuple[tuple[str, Any], ...], tuple[str, ...]]:
    """The options that belong to the tokenizer's type, and the names of those given that belong to others."""
    given: dict[str, tuple[str, Any]] = {}
    if arguments.tokenizer_special_tokens is not None:
        given["--tokenizer-special-tokens"] = ("special_tokens", list(arguments.tokenizer_special_tokens))
    if arguments.tokenizer_hf_no_include_special_tokens:
        given["--tokenizer-hf-no-include-special-tokens"] = ("include_special_tokens", False)
    if arguments.special_tokens_in_text != "special":
        given["--special-tokens-in-text"] = ("special_in_text", arguments.special_tokens_in_text)
    if arguments.vocab_size is not None:
        given["--vocab-size"] = ("vocab_size", arguments.vocab_size)
    if arguments.null_tokenizer_eod_id is not None:
        given["--null-tokenizer-eod-id"] = ("eod_id", arguments.null_tokenizer_eod_id)
    taken = _TYPE_OPTIONS.get(arguments.tokenizer_type, tuple(given))
    return tuple(given[name] for name in given if name in taken), tuple(name for name in given if name not in taken)


def tokenizer_of(arguments: argparse.Namespace) -> tuple[mdata.Tokenizer, tuple[str, ...]]:
    """The tokenizer that the options name, and the options that have no effect on it."""
    options, unused = tokenizer_options_of(arguments)
    spec = mdata.TokenizerSpec(
        type=arguments.tokenizer_type,
        model=arguments.tokenizer_model,
        vocab_file=arguments.vocab_file,
        merge_file=arguments.merge_file,
        options=options,
    )
    return mdata.load_tokenizer(spec), unused
