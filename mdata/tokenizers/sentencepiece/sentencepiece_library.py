"""The `sentencepiece` library, whose ids are right by definition.

It gives the plain encoding, without BOS or EOS. When it refuses a file it prints nothing: its message goes into the
error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mdata.errors import UsageError
from mdata.tokenizers.base.helpers import batches, concatenate, refuse_surrogates
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, TextRefused
from mdata.util.stop_signals import LibraryError, library_errors

# The library takes up to 200 bytes of memory for every byte of a text that it encodes.
_BATCH_CHARS = 1 << 20
_ONLY_FATAL = 3
_MAX_MESSAGE_CHARS = 2000


class SentencePieceLibrary:
    """The `sentencepiece` library.

    Raises:
        UsageError: the library refuses it.
    """

    name = "sentencepiece"

    def __init__(self, content: bytes, source: str) -> None:
        import sentencepiece

        sentencepiece.set_min_log_level(_ONLY_FATAL)
        try:
            with library_errors(RuntimeError, ValueError, chars=_MAX_MESSAGE_CHARS):
                self.library: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
        except LibraryError as error:
            raise UsageError(f"{source}: the sentencepiece library refuses it", found=_message(error)) from error

    def encode(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """The ids of all texts, concatenated, and the number of ids of each.

        Raises:
            TextRefused: a text that has no ids.
        """
        arrays: list[IdArray] = []
        for start, stop in batches(texts, _BATCH_CHARS):
            batch = list(texts[start:stop])
            try:
                with library_errors(TypeError, RuntimeError, UnicodeError, chars=_MAX_MESSAGE_CHARS):
                    arrays += self.library.encode(batch, return_type="numpy", num_threads=1)
            except LibraryError as error:
                self._refuse(batch, start)
                raise TextRefused(start, f"the sentencepiece library fails: {_message(error)}") from error
        return concatenate(arrays)

    def pieces(self, text: str) -> list[str]:
        """The pieces of a text."""
        return list(self.library.encode(text, return_type=str))

    def _refuse(self, texts: Sequence[str], first: int) -> None:
        """Raise TextRefused for the first text on which the library fails."""
        for index, text in enumerate(texts, first):
            refuse_surrogates([text], index)
            try:
                with library_errors(RuntimeError, chars=_MAX_MESSAGE_CHARS):
                    self.library.encode([text], num_threads=1)
            except LibraryError as error:
                raise TextRefused(index, f"the sentencepiece library fails: {_message(error)}") from error


def _message(error: LibraryError) -> str:
    """The library's message without the positions in its source."""
    text = re.sub(r"\S+\.(cc|h)\(\d+\) ", "", str(error))
    return text.removeprefix("INTERNAL: ")[:200]
