"""Megatron's names of tokenizer types, and which of them this version can load.

To add one: write a class of that name (protocol.py: `TokenizerType`) and put its module into `_MODULES`. Libraries are
imported by those modules only, so a name costs nothing until it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from mdata.errors import UsageError
from mdata.tokenizers.base.tokenizer import Tokenizer, TokenizerSpec, TokenizerType
from mdata.util.option_synonyms import nearest

_MODULES = MappingProxyType(
    {
        "GPT2BPETokenizer": "mdata.tokenizers.types.gpt2",
        "HuggingFaceTokenizer": "mdata.tokenizers.types.huggingface",
        "BertWordPieceLowerCase": "mdata.tokenizers.types.wordpiece",
        "BertWordPieceCase": "mdata.tokenizers.types.wordpiece",
        "TikTokenizer": "mdata.tokenizers.types.tiktoken",
        "SentencePieceTokenizer": "mdata.tokenizers.types.sentencepiece",
        "GPTSentencePieceTokenizer": "mdata.tokenizers.types.sentencepiece",
        "Llama2Tokenizer": "mdata.tokenizers.types.sentencepiece",
        "NullTokenizer": "mdata.tokenizers.types.null",
        "ByteTokenizer": "mdata.tokenizers.types.byte",
    }
)
# The fields of PreprocessOptions that name what a type reads.
FILES_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "GPT2BPETokenizer": ("vocab_file", "merge_file"),
        "HuggingFaceTokenizer": ("tokenizer_model",),
        "BertWordPieceLowerCase": ("vocab_file",),
        "BertWordPieceCase": ("vocab_file",),
        "TikTokenizer": ("tokenizer_model",),
        "SentencePieceTokenizer": ("tokenizer_model",),
        "GPTSentencePieceTokenizer": ("tokenizer_model",),
        "Llama2Tokenizer": ("tokenizer_model",),
        "NullTokenizer": (),
        "ByteTokenizer": (),
    }
)
# Their options say all; nothing is kept beside a corpus.
WITHOUT_FILES = frozenset(type for type, read in FILES_OF.items() if not read)

# What a type does where an option is not given. `include_special_tokens` is not among them: a type names it always.
_DEFAULTS = MappingProxyType(
    {
        "special_tokens": [],
        "special_in_text": "special",
        "legacy": False,
        "ignore_extra_whitespaces": True,
        "pattern": "v2",
        "num_special_tokens": 1000,
    }
)

# Megatron lists them, but its preprocess_data.py cannot make them.
_KNOWN_BUT_NOT_HERE = (
    "MultimodalTokenizer",
    "NullMultimodalTokenizer",
    "SFTTokenizer",
)


def available() -> tuple[str, ...]:
    """The names of types that `load_tokenizer` takes."""
    return tuple(_MODULES)


def load_tokenizer(spec: TokenizerSpec | str, model: str | Path | None = None, **options: Any) -> Tokenizer:
    """Load a tokenizer from the files that a user names, with the fastest engine that gives the exact ids here.

    Args:
        spec: what is asked for; or Megatron's name of the type, and then
        model: a folder with tokenizer.json, or such a file, and
        options: what the type takes besides.

    Raises:
        UsageError: an unknown name or option, files that are missing or cannot be read as that type, or an
            engine that was named and cannot be had.
    """
    if isinstance(spec, str):
        spec = TokenizerSpec(type=spec, model=None if model is None else str(model), options=tuple(options.items()))
    kind = _type(spec.type)
    return kind.load(spec, _checked_options(spec.type, kind.OPTIONS, dict(spec.options)))


def build_tokenizer(
    name: str, files: Mapping[str, bytes], *, engine: str = "tokenizers", options: Mapping[str, Any] | None = None
) -> Tokenizer:
    """The tokenizer whose `files` and `options` these are; needs no file system.

    Args:
        name: Megatron's name of the type.
        files: as a Tokenizer has them.
        engine: as a Tokenizer has it: one that `load_tokenizer` found equal is not compared again.
        options: as a Tokenizer has them.
    """
    return _type(name).build(files, options or {}, engine=engine)


def _checked_options(name: str, known: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that were left at their default, which a manifest need not tell."""
    for option in options:
        if option not in known:
            raise UsageError(f"{name} has no option {option!r}", expected=f"one of {', '.join(known)}")
    if options.get("special_tokens") is not None:
        options = {**options, "special_tokens": list(options["special_tokens"])}
    return {
        option: value
        for option, value in options.items()
        if value is not None and (option not in _DEFAULTS or value != _DEFAULTS[option])
    }


def _type(name: str) -> TokenizerType:
    if name in _MODULES:
        return cast(TokenizerType, getattr(import_module(_MODULES[name]), name))
    if name in _KNOWN_BUT_NOT_HERE:
        what = (
            f"tokenizer type {name} needs options that Megatron's preprocess_data.py does not have: it fails there too"
        )
        raise UsageError(what, expected=f"one of {', '.join(_MODULES)}")
    close = nearest(name, (*_MODULES, *_KNOWN_BUT_NOT_HERE))
    raise UsageError(
        f"no tokenizer type {name!r}",
        expected=f"one of {', '.join(_MODULES)}",
        fix=f"{close}?" if close else None,
    )
