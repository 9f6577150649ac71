"""BertWordPieceCase under its own name; all of it is in wordpiece.py.

The registry knows one module for each type.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mdata.tokenizers.engines import EXACT
from mdata.tokenizers.protocol import Tokenizer, TokenizerSpec
from mdata.tokenizers.wordpiece import CASE, OPTIONS, build_named, load_named

__all__ = ["OPTIONS", "build", "load"]


def load(spec: TokenizerSpec, options: Mapping[str, Any]) -> Tokenizer:
    """See `load_named`."""
    return load_named(CASE, spec, options=options)


def build(files: Mapping[str, bytes], options: Mapping[str, Any], *, engine: str = EXACT) -> Tokenizer:
    """See `build_named`."""
    return build_named(CASE, files, options=options, engine=engine)
