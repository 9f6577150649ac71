"""Tokenizers by Megatron's names.

To add a type: write a class with that name (mdata/tokenizers/base/tokenizer.py: `TokenizerType`) and add its module to
`_MODULES`. Only those modules import libraries, so an unused type costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from mdata.errors import UsageError
from mdata.tokenizers.base.tokenizer import SelectsEngine, Tokenizer, TokenizerConfig, TokenizerSpec, TokenizerType
from mdata.util.option_synonyms import nearest

_TYPES = "mdata.tokenizers.types."
_MODULES = MappingProxyType(
    {
        "GPT2BPETokenizer": _TYPES + "gpt2",
        "HuggingFaceTokenizer": _TYPES + "huggingface",
        "BertWordPieceLowerCase": _TYPES + "wordpiece",
        "BertWordPieceCase": _TYPES + "wordpiece",
        "TikTokenizer": _TYPES + "tiktoken",
        "SentencePieceTokenizer": _TYPES + "sentencepiece",
        "GPTSentencePieceTokenizer": _TYPES + "sentencepiece",
        "Llama2Tokenizer": _TYPES + "sentencepiece",
        "NullTokenizer": _TYPES + "null",
        "ByteTokenizer": _TYPES + "byte",
        "RWKVTokenizer": _TYPES + "rwkv",
    }
)
# The options that name a type's files, unless that is a single --tokenizer-model.
_FILES = MappingProxyType(
    {
        "GPT2BPETokenizer": ("vocab_file", "merge_file"),
        "BertWordPieceLowerCase": ("vocab_file",),
        "BertWordPieceCase": ("vocab_file",),
        "NullTokenizer": (),
        "ByteTokenizer": (),
    }
)
FILES_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {type: _FILES.get(type, ("tokenizer_model",)) for type in _MODULES}
)
"""Type -> the fields of PreprocessOptions that name its files."""
WITHOUT_FILES = frozenset(type for type, files in FILES_OF.items() if not files)
"""Types whose options say all; no files are kept beside a corpus."""

# Options with these values are left out of a manifest; `include_special_tokens` is always recorded.
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

# Megatron lists them, but its preprocess_data.py cannot build them.
_UNSUPPORTED = ("MultimodalTokenizer", "NullMultimodalTokenizer", "SFTTokenizer")


def available() -> tuple[str, ...]:
    """The names of all types."""
    return tuple(_MODULES)


def load_tokenizer(
    spec: TokenizerSpec | str,
    model: str | Path | None = None,
    *,
    special_tokens: Sequence[str] | None = None,
    special_in_text: str | None = None,
    include_special_tokens: bool | None = None,
    vocab_size: int | None = None,
    eod_id: int | None = None,
    num_special_tokens: int | None = None,
    pattern: str | None = None,
    legacy: bool | None = None,
    ignore_extra_whitespaces: bool | None = None,
    compat: str | None = None,
    on_files_read: Callable[[TokenizerConfig], None] | None = None,
) -> Tokenizer:
    """Load a tokenizer from the files that a user names, with the fastest engine that gives the exact ids here.

    Args:
        spec: the tokenizer; or Megatron's name of the type, and then the other arguments:
        model: a folder with tokenizer.json, or a file.
        special_tokens, special_in_text, include_special_tokens, vocab_size, eod_id, num_special_tokens, pattern,
        legacy, ignore_extra_whitespaces, compat: options of the type (docs/reference/tokenizers.md); None: the usual.
        on_files_read: called before engines are compared, if there are several, with the config of the one that is
            probably used.

    Raises:
        UsageError: an unknown name or option, files that are missing or invalid for that type, or a named engine that
            cannot be used.
    """
    if isinstance(spec, str):
        options = {
            "special_tokens": special_tokens,
            "special_in_text": special_in_text,
            "include_special_tokens": include_special_tokens,
            "vocab_size": vocab_size,
            "eod_id": eod_id,
            "num_special_tokens": num_special_tokens,
            "pattern": pattern,
            "legacy": legacy,
            "ignore_extra_whitespaces": ignore_extra_whitespaces,
            "compat": compat,
        }
        given = tuple((name, value) for name, value in options.items() if value is not None)
        spec = TokenizerSpec(type=spec, model=None if model is None else str(model), options=given)
    type = _type(spec.type)
    tokenizer = type.load(spec, _checked_options(spec.type, type.OPTIONS, dict(spec.options)))
    if isinstance(tokenizer, SelectsEngine):
        if on_files_read is not None:
            on_files_read(config_of(tokenizer)._replace(engine=tokenizer.likely_engine(spec.engine)))
        tokenizer.select_engine(spec.engine)
    return tokenizer


def config_of(tokenizer: Tokenizer) -> TokenizerConfig:
    """The arguments with which `build_tokenizer` makes the same tokenizer."""
    return TokenizerConfig(tokenizer.name, dict(tokenizer.files), dict(tokenizer.options), tokenizer.engine)


def build_tokenizer(
    name: str, files: Mapping[str, bytes], *, engine: str = "tokenizers", options: Mapping[str, Any] | None = None
) -> Tokenizer:
    """Build the tokenizer with these files and options; needs no file system.

    Args:
        name: Megatron's name of the type.
        files: those of a Tokenizer.
        engine: that of a Tokenizer; it is not compared with the exact one again.
        options: those of a Tokenizer.
    """
    return _type(name).build(files, options or {}, engine=engine)


def _checked_options(name: str, allowed: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """The options without default values."""
    for option in options:
        if option not in allowed:
            raise UsageError(f"{name} has no option {option!r}", expected=f"one of {', '.join(allowed)}")
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
    if name in _UNSUPPORTED:
        problem = f"tokenizer type {name} is not supported: it needs options that Megatron's preprocess_data.py lacks"
        raise UsageError(problem, expected=f"one of {', '.join(_MODULES)}")
    close = nearest(name, (*_MODULES, *_UNSUPPORTED))
    raise UsageError(
        f"no tokenizer type {name!r}",
        expected=f"one of {', '.join(_MODULES)}",
        fix=f"{close}?" if close else None,
    )
