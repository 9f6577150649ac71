"""Llama2Tokenizer: the same ids as SentencePieceTokenizer, no BOS.

The older fork put BOS before every sentence, an empty one too. See mdata/tokenizers/sentencepiece_base.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mdata.tokenizers.protocol import TokenizerSpec
from mdata.tokenizers.sentencepiece_base import OPTIONS, SentencePieceFamily, read_files

__all__ = ["NAME", "OPTIONS", "Llama2Tokenizer", "build", "load"]

NAME = "Llama2Tokenizer"


class Llama2Tokenizer(SentencePieceFamily):
    """See `mdata.tokenizers.protocol.Tokenizer`."""

    name = NAME
    fork_bos = True


def load(spec: TokenizerSpec, options: Mapping[str, Any]) -> Llama2Tokenizer:
    """The tokenizer of a model file, with its best engine.

    Raises:
        UsageError: no file was named, it cannot be read or used, or the engine that was named cannot be had.
    """
    return Llama2Tokenizer(read_files(spec), options, source=str(spec.model)).checked(spec.engine)


def build(files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> Llama2Tokenizer:
    """A tokenizer from the content of its model file, which `load` has checked once.

    Args:
        files: as a tokenizer has them.
        options: as a tokenizer has them.
        engine: what gives the ids; not compared with the library here.
    """
    return Llama2Tokenizer(files, options).with_engine(engine)
