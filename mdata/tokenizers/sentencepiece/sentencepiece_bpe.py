"""Our own engine for SentencePiece's BPE (mdata_cpp/sentencepiece.hpp); the twin is tests/reference/sentencepiece.py.

It is used for a supported model if it gives the library's ids for the self-check texts. It caches words in at most 40
MB for each thread that encodes. mdata/tokenizers/types/sentencepiece.py registers it in one line.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mdata.tokenizers.base.helpers import refuse_surrogates
from mdata.tokenizers.base.self_check_texts import byte_level_texts
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray
from mdata.tokenizers.sentencepiece.sentencepiece_library import SentencePieceLibrary
from mdata.tokenizers.sentencepiece.sentencepiece_model import BLANK, NORMAL, UNUSED, USER_DEFINED, SentencePieceModel

_MAX_PIECES = 4000


class SentencePieceBpe:
    """The engine.

    Raises:
        ValueError: the model's normalization rules are damaged.
    """

    name = "mdata"

    def __init__(self, model: SentencePieceModel) -> None:
        from mdata._core import SentencePiece

        self._core = SentencePiece(
            list(model.pieces),
            np.array(model.scores, dtype=np.float32),
            model.kinds,
            model.charsmap,
            model.add_dummy_prefix,
            model.remove_extra_whitespaces,
            model.whitespace_as_suffix,
        )

    def encode(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """See SentencePieceLibrary."""
        try:
            return self._core.encode(texts if isinstance(texts, list) else list(texts))
        except UnicodeEncodeError:
            refuse_surrogates(texts)
            raise

    @staticmethod
    def unsupported(model: SentencePieceModel) -> str | None:
        """Why the engine does not support a model; None: it does."""
        if model.model_type != "bpe":
            return f"its model is {model.model_type}, not BPE"
        if not model.escape_whitespaces:
            return "the model leaves blanks as they are"
        return "the model has unused pieces" if UNUSED in model.kinds else None

    @classmethod
    def try_model(cls, model: SentencePieceModel, exact: SentencePieceLibrary) -> SentencePieceBpe | str:
        """The engine, if it gives the library's ids for the self-check texts; otherwise why it cannot be used."""
        if reason := cls.unsupported(model):
            return reason
        try:
            engine = cls(model)
        except ValueError as error:
            return f"it fails: {error}"
        texts = self_check_texts(model)
        theirs = exact.encode(texts)
        for _ in range(2):  # the second pass reads words from the cache
            ours = engine.encode(texts)
            split = (np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in (ours, theirs))
            other = next((text for text, a, b in zip(texts, *split, strict=True) if not np.array_equal(a, b)), None)
            if other is not None:
                return f"it gives other ids for {other[:40]!r}"
        return engine


def self_check_texts(model: SentencePieceModel) -> list[str]:
    """The texts for byte-level BPE, and pieces of the model joined in many ways."""
    users = [model.pieces[id] for id in model.ids_of_kind(USER_DEFINED)]
    reserved = [piece for piece, kind in zip(model.pieces, model.kinds, strict=True) if kind != NORMAL][:8]
    words = [piece.replace(BLANK, " ") for piece, kind in zip(model.pieces, model.kinds, strict=True) if kind == NORMAL]
    words = words[:: max(1, len(words) // _MAX_PIECES)]
    glued = ["".join(words[at : at + size]) for size in (1, 2, 3, 7) for at in range(0, len(words), size)]
    blanks = [f"{BLANK}a{BLANK} {BLANK}b {BLANK}", "  a  b   ", f"{BLANK} ", "\u3000\xa0a\u200b\t\tb\r\n"]
    return [*byte_level_texts([], [*users, *reserved, BLANK]), *glued, "\n".join(words), *blanks]
