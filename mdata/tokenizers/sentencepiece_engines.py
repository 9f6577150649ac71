"""What turns texts into ids for a SentencePiece model: the library, whose ids are right by definition.

An engine gives the plain encoding, no BOS or EOS, as one array for a whole batch. The library has to be quiet
about files that it refuses: what it says becomes the text of an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from mdata.errors import UsageError, nearest
from mdata.tokenizers.protocol import IdArray, LengthArray, TextRefused

AUTO = "auto"
EXACT = "sentencepiece"
ENGINES = (EXACT,)

# The library takes up to 200 bytes of memory for every byte of a text while it works on it.
_BATCH_CHARS = 1 << 20
_ONLY_FATAL = 3


class Engine(Protocol):
    """One model, ready to encode."""

    name: str

    def encode(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """The ids of all texts, one after another, and how many each gave.

        Raises:
            TextRefused: a text that has no ids.
        """


class LibraryEngine:
    """The `sentencepiece` library.

    Args:
        content: the model file.
        source: how to call it in errors.

    Raises:
        UsageError: the library refuses it.
    """

    name = EXACT

    def __init__(self, content: bytes, source: str) -> None:
        import sentencepiece

        sentencepiece.set_min_log_level(_ONLY_FATAL)
        try:
            self.library: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
        except (RuntimeError, ValueError) as error:
            raise UsageError(f"{source}: the sentencepiece library refuses it", found=_cleaned(error)) from error

    def encode(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """See Engine."""
        arrays: list[IdArray] = []
        for start, stop in _batches(texts):
            batch = list(texts[start:stop])
            try:
                arrays += self.library.encode(batch, return_type="numpy", num_threads=1)
            except (TypeError, RuntimeError, UnicodeError) as error:
                self._refuse(batch, start)
                raise TextRefused(start, f"the sentencepiece library fails: {_cleaned(error)}") from error
        return joined(arrays)

    def pieces(self, text: str) -> list[str]:
        """The pieces of a text, those that are unknown as they stand there."""
        return list(self.library.encode(text, return_type=str))

    def _refuse(self, texts: Sequence[str], first: int) -> None:
        """Raise TextRefused for the first of the texts that the library does not take."""
        for index, text in enumerate(texts, first):
            refuse_surrogates(index, text)
            try:
                self.library.encode([text], num_threads=1)
            except RuntimeError as error:
                raise TextRefused(index, f"the sentencepiece library fails: {_cleaned(error)}") from error


def joined(arrays: Sequence[IdArray]) -> tuple[IdArray, LengthArray]:
    """Arrays of ids as one, and their lengths."""
    lengths = np.fromiter(map(len, arrays), dtype=np.int64, count=len(arrays))
    return np.concatenate(arrays) if arrays else np.empty(0, dtype=np.int32), lengths


def refuse_surrogates(index: int, text: str) -> None:
    """Raise TextRefused if a lone surrogate is in the text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextRefused(index, f"a lone surrogate at character {error.start}") from error


def check_name(wanted: str) -> None:
    """Raise UsageError unless this is "auto" or the name of an engine of SentencePiece models."""
    if wanted not in (AUTO, *ENGINES):
        close = nearest(wanted, (AUTO, *ENGINES))
        what = f"no engine {wanted!r} for SentencePiece models"
        raise UsageError(what, expected=f"one of {AUTO}, {', '.join(ENGINES)}", fix=f"{close}?" if close else None)


def _batches(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Runs of texts of bounded size."""
    start = size = 0
    for stop, text in enumerate(texts, 1):
        size += len(text)
        if size >= _BATCH_CHARS or stop == len(texts):
            yield start, stop
            start, size = stop, 0


def _cleaned(error: Exception) -> str:
    """What the library said, without the places in its source."""
    text = re.sub(r"\S+\.(cc|h)\(\d+\) ", "", " ".join(str(error).split()))
    return text.removeprefix("INTERNAL: ")[:200]
