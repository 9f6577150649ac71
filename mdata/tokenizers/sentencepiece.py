"""SentencePieceTokenizer: a model of the SentencePiece library, its plain ids (mdata/tokenizers/sentencepiece_base.py).

The older fork cut its texts at tokens of its own, of which <EOD> ended documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mdata.tokenizers.protocol import TokenizerSpec
from mdata.tokenizers.sentencepiece_base import OPTIONS, SentencePieceFamily, read_files

__all__ = ["NAME", "OPTIONS", "SentencePieceTokenizer", "build", "load"]

NAME = "SentencePieceTokenizer"


class SentencePieceTokenizer(SentencePieceFamily):
    """See `mdata.tokenizers.protocol.Tokenizer`."""

    name = NAME
    fork_cuts = True


def load(spec: TokenizerSpec, options: Mapping[str, Any]) -> SentencePieceTokenizer:
    """The tokenizer of a model file, with its best engine.

    Raises:
        UsageError: no file was named, it cannot be read or used, or the engine that was named cannot be had.
    """
    return SentencePieceTokenizer(read_files(spec), options, source=str(spec.model)).checked(spec.engine)


def build(files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str) -> SentencePieceTokenizer:
    """A tokenizer from the content of its model file, which `load` has checked once.

    Args:
        files: as a tokenizer has them.
        options: as a tokenizer has them.
        engine: what gives the ids; not compared with the library here.
    """
    return SentencePieceTokenizer(files, options).with_engine(engine)
