"""The options that name a tokenizer, with Megatron's names: the same in every command that takes one.

An option that belongs to another tokenizer type has no effect; the command names it.
"""

from __future__ import annotations

import argparse
from types import MappingProxyType
from typing import Any

import mdata
from mdata.tokenizers.base.tokenizer import TokenizerSpec
from mdata.tokenizers.registry import FILES_OF

_SPECIAL, _IN_TEXT, _COMPAT = "--tokenizer-special-tokens", "--special-tokens-in-text", "--compat"
_AROUND = "--tokenizer-hf-no-include-special-tokens"
_WHITESPACE = "--no-tokenizer-sentencepiece-ignore-extra-whitespaces"
_BERT = (_SPECIAL, _IN_TEXT, _AROUND, _COMPAT)
_SENTENCEPIECE = (_SPECIAL, _IN_TEXT, "--tokenizer-sentencepiece-legacy", _WHITESPACE, _COMPAT)
# The options of each tokenizer type besides its files. The loader refuses a type that is not listed here.
_TYPE_OPTIONS = MappingProxyType(
    {
        "GPT2BPETokenizer": (_SPECIAL, _IN_TEXT, _COMPAT),
        "BertWordPieceLowerCase": _BERT,
        "BertWordPieceCase": _BERT,
        "SentencePieceTokenizer": _SENTENCEPIECE,
        "GPTSentencePieceTokenizer": _SENTENCEPIECE,
        "Llama2Tokenizer": _SENTENCEPIECE,
        "HuggingFaceTokenizer": (_SPECIAL, _IN_TEXT, _AROUND),
        "TikTokenizer": (_SPECIAL, _IN_TEXT, "--vocab-size", "--tiktoken-pattern", "--tiktoken-num-special-tokens"),
        "NullTokenizer": ("--vocab-size", "--null-tokenizer-eod-id", _COMPAT),
        "ByteTokenizer": (),
        "RWKVTokenizer": (),
    }
)


def add_tokenizer(group: argparse._ArgumentGroup, *, required: bool) -> None:
    """Megatron's options of the tokenizer."""
    add = group.add_argument
    add("--tokenizer-type", required=required, metavar="TYPE", help="tokenizer type, see mdata tokenizers")
    add("--tokenizer-model", metavar="PATH", help="folder or file of the tokenizer; nothing is downloaded")
    add("--vocab-file", "--vocab", metavar="FILE", help="vocab.json of GPT-2, or vocab.txt of BertWordPiece*")
    add("--merge-file", metavar="FILE", help="GPT2BPETokenizer: merges.txt")
    add(
        "--vocab-size",
        type=int,
        metavar="N",
        help="NullTokenizer: number of ids; TikTokenizer: number of entries (default: 131072)",
    )
    add("--null-tokenizer-eod-id", type=int, metavar="ID", help="NullTokenizer: end-of-document id (default: N - 1)")
    add("--tokenizer-special-tokens", nargs="+", metavar="TOKEN", help="further special tokens")
    add("--tokenizer-hf-no-include-special-tokens", action="store_true", help="do not add BOS, CLS and the like")
    add("--tokenizer-sentencepiece-legacy", action="store_true", help="special tokens get ids after the pieces")
    other = "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces"
    add(_WHITESPACE, other, action="store_true", dest="keep_extra_whitespaces", help="keep runs of spaces")
    patterns = ("v1", "v2", "cl100k_base", "o200k_base", "llama3", "qwen2")
    add("--tiktoken-pattern", choices=patterns, help="TikTokenizer: pattern that splits words (default: v2)")
    add(
        "--tiktoken-num-special-tokens",
        type=int,
        metavar="N",
        help="TikTokenizer: number of special ids (default: 1000)",
    )


def add_variants(group: argparse._ArgumentGroup) -> None:
    """Our own options: how special tokens in texts are treated, and the ids of an older version of Megatron."""
    group.add_argument(
        "--special-tokens-in-text",
        choices=("special", "plain"),
        default="special",
        help="special tokens in texts: as their ids or plain text",
    )
    group.add_argument("--compat", choices=("megatron-2023",), help="reproduce the token ids of Megatron in late 2023")


def tokenizer_options_of(arguments: argparse.Namespace) -> tuple[tuple[tuple[str, Any], ...], tuple[str, ...]]:
    """The options that belong to the tokenizer's type, and the names of those given that belong to others."""
    values: dict[str, tuple[str, Any]] = {
        _SPECIAL: ("special_tokens", arguments.tokenizer_special_tokens),
        _AROUND: ("include_special_tokens", False if arguments.tokenizer_hf_no_include_special_tokens else None),
        _IN_TEXT: ("special_in_text", "plain" if arguments.special_tokens_in_text == "plain" else None),
        _COMPAT: ("compat", arguments.compat),
        "--vocab-size": ("vocab_size", arguments.vocab_size),
        "--null-tokenizer-eod-id": ("eod_id", arguments.null_tokenizer_eod_id),
        "--tokenizer-sentencepiece-legacy": ("legacy", arguments.tokenizer_sentencepiece_legacy or None),
        _WHITESPACE: ("ignore_extra_whitespaces", False if arguments.keep_extra_whitespaces else None),
        "--tiktoken-pattern": ("pattern", arguments.tiktoken_pattern),
        "--tiktoken-num-special-tokens": ("num_special_tokens", arguments.tiktoken_num_special_tokens),
    }
    set_options = {option: (name, value) for option, (name, value) in values.items() if value is not None}
    # Other ids were requested: a type that does not have them says so itself.
    taken = (*_TYPE_OPTIONS.get(arguments.tokenizer_type, tuple(set_options)), _COMPAT)
    return tuple(set_options[name] for name in set_options if name in taken), tuple(
        name for name in set_options if name not in taken
    )


def given_options(arguments: argparse.Namespace) -> list[str]:
    """The given options above, except for the type."""
    options = tokenizer_options_of(argparse.Namespace(**vars(arguments) | {"tokenizer_type": "ByteTokenizer"}))
    return [*options[1], *([_COMPAT] if arguments.compat else []), *_files_given(arguments)]


def _files_given(arguments: argparse.Namespace) -> list[str]:
    names = ("tokenizer_model", "vocab_file", "merge_file")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]


def tokenizer_of(arguments: argparse.Namespace) -> tuple[mdata.Tokenizer, tuple[str, ...]]:
    """The tokenizer that the options name, and the options that have no effect on it."""
    spec, unused = spec_of(arguments)
    read = [f"--{name.replace('_', '-')}" for name in FILES_OF.get(arguments.tokenizer_type, ())]
    unused += tuple(name for name in _files_given(arguments) if name not in read)
    return mdata.load_tokenizer(spec), unused


def spec_of(arguments: argparse.Namespace) -> tuple[TokenizerSpec, tuple[str, ...]]:
    """The tokenizer that the options name, not loaded, and the given options that belong to other types."""
    options, unused = tokenizer_options_of(arguments)
    spec = TokenizerSpec(
        type=arguments.tokenizer_type,
        model=arguments.tokenizer_model,
        vocab_file=arguments.vocab_file,
        merge_file=arguments.merge_file,
        options=options,
    )
    return spec, unused
