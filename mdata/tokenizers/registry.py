"""Megatron's names of tokenizer types, and which of them this version can load.

To add one: write a module with `read_files(model) -> files` and `build(files, **options) -> Tokenizer`, and
put it into `_LOADERS`. Libraries are imported by those modules only, so a name costs nothing until it is
used.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from mdata.errors import UsageError, nearest
from mdata.tokenizers.protocol import Tokenizer

_LOADERS = {"HuggingFaceTokenizer": "mdata.tokenizers.huggingface"}

_KNOWN_BUT_NOT_HERE = (
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "GPT2BPETokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "MultimodalTokenizer",
    "NullTokenizer",
    "NullMultimodalTokenizer",
    "SFTTokenizer",
)


def available() -> tuple[str, ...]:
    """The names that `load_tokenizer` takes."""
    return tuple(_LOADERS)


def load_tokenizer(name: str, model: str | Path, **options: Any) -> Tokenizer:
    """Load a tokenizer from the files that a user names.

    Args:
        name: Megatron's name of the type.
        model: for HuggingFaceTokenizer a folder with tokenizer.json, or such a file.
        options: what the type takes besides; see its module.

    Raises:
        UsageError: an unknown name, or files that are missing or cannot be read as that type.
    """
    module = _module(name)
    files = module.read_files(Path(model))
    try:
        return cast(Tokenizer, module.build(files, **options))
    except UsageError as error:
        raise UsageError(f"{model}: {error}") from error


def build_tokenizer(name: str, files: Mapping[str, bytes], **options: Any) -> Tokenizer:
    """The tokenizer whose `files` these are; in a worker process this needs no file system."""
    return cast(Tokenizer, _module(name).build(files, **options))


def _module(name: str) -> Any:
    if name in _LOADERS:
        return import_module(_LOADERS[name])
    if name in _KNOWN_BUT_NOT_HERE:
        what = f"tokenizer type {name} is not in this version of mdata"
        raise UsageError(what, expected=f"one of {', '.join(_LOADERS)}")
    close = nearest(name, (*_LOADERS, *_KNOWN_BUT_NOT_HERE))
    raise UsageError(
        f"no tokenizer type {name!r}",
        expected=f"one of {', '.join(_LOADERS)}",
        fix=f"{close}?" if close else None,
    )
