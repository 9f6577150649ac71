"""What turns texts into ids for a SentencePiece model: the library, whose ids are right by definition, and our own.

An engine gives the plain encoding, no BOS or EOS, as one array for a whole batch. The library has to be quiet
about files that it refuses: what it says becomes the text of an error. Ours (mdata_cpp/sentencepiece.hpp) does BPE
models and remembers words in at most 40 MB; it is taken where it gives the library's ids for a fixed hostile text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from mdata.errors import UsageError
from mdata.tokenizers.base.self_check_texts import hostile_texts
from mdata.tokenizers.base.tokenizer import IdArray, LengthArray, TextRefused
from mdata.tokenizers.sentencepiece.sentencepiece_model import BLANK, NORMAL, UNUSED, USER_DEFINED, SentencePieceModel
from mdata.util.option_synonyms import nearest
from mdata.util.stop_signals import LibraryError, library_errors

AUTO = "auto"
EXACT = "sentencepiece"
OWN = "mdata"
# From the fastest to the slowest.
ENGINES = (OWN, EXACT)

# The library takes up to 200 bytes of memory for every byte of a text while it works on it.
_BATCH_CHARS = 1 << 20
_ONLY_FATAL = 3
_MOST_SAID_CHARS = 2000


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
            with library_errors(RuntimeError, ValueError, chars=_MOST_SAID_CHARS):
                self.library: Any = sentencepiece.SentencePieceProcessor(model_proto=content)
        except LibraryError as error:
            raise UsageError(f"{source}: the sentencepiece library refuses it", found=_cleaned(error)) from error

    def encode(self, texts: Sequence[str]) -> tuple[IdArray, LengthArray]:
        """See Engine."""
        arrays: list[IdArray] = []
        for start, stop in _batches(texts):
            batch = list(texts[start:stop])
            try:
                with library_errors(TypeError, RuntimeError, UnicodeError, chars=_MOST_SAID_CHARS):
                    arrays += self.library.encode(batch, return_type="numpy", num_threads=1)
            except LibraryError as error:
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
                with library_errors(RuntimeError, chars=_MOST_SAID_CHARS):
                    self.library.encode([text], num_threads=1)
            except LibraryError as error:
                raise TextRefused(index, f"the sentencepiece library fails: {_cleaned(error)}") from error


class OwnEngine:
    """Our own BPE.

    Args:
        model: one that `own_obstacle` finds nothing in the way of.

    Raises:
        ValueError: its rules of normalization are damaged.
    """

    name = OWN

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
        """See Engine."""
        try:
            return self._core.encode(texts if isinstance(texts, list) else list(texts))
        except UnicodeEncodeError:
            for index, text in enumerate(texts):
                refuse_surrogates(index, text)
            raise


def own_obstacle(model: SentencePieceModel) -> str | None:
    """Why our own engine cannot do this model; None: it can."""
    if model.model_type != "bpe":
        return f"it does BPE, and this model is of the type {model.model_type}"
    if not model.escape_whitespaces:
        return "the model leaves blanks as they are"
    return "the model has unused pieces" if UNUSED in model.kinds else None


def try_own(model: SentencePieceModel, exact: LibraryEngine) -> OwnEngine | str:
    """Our own engine, if it gives the library's ids for the hostile texts; else why it is not taken."""
    if obstacle := own_obstacle(model):
        return obstacle
    try:
        engine = OwnEngine(model)
    except ValueError as error:
        return f"it fails: {error}"
    texts = self_check_texts(model)
    # Each text twice: the second time its words are known.
    ours, ours_again, theirs = engine.encode(texts), engine.encode(texts), exact.encode(texts)
    for text, *found in zip(
        texts, *(np.split(i, np.cumsum(n)[:-1]) for i, n in (ours, ours_again, theirs)), strict=True
    ):
        if not np.array_equal(found[0], found[2]) or not np.array_equal(found[1], found[2]):
            return f"it gives other ids for {text[:40]!r}"
    return engine


def self_check_texts(model: SentencePieceModel) -> list[str]:
    """The hostile texts, and pieces of the model itself side by side."""
    users = [model.pieces[id] for id in model.ids_of_kind(USER_DEFINED)]
    reserved = [piece for piece, kind in zip(model.pieces, model.kinds, strict=True) if kind != NORMAL][:8]
    words = [piece.replace(BLANK, " ") for piece, kind in zip(model.pieces, model.kinds, strict=True) if kind == NORMAL]
    words = words[:: max(1, len(words) // _MOST_PIECES)]
    glued = ["".join(words[at : at + size]) for size in (1, 2, 3, 7) for at in range(0, len(words), size)]
    blanks = [f"{BLANK}a{BLANK} {BLANK}b {BLANK}", "  a  b   ", f"{BLANK} ", "\u3000\xa0a\u200b\t\tb\r\n"]
    return [*hostile_texts([], [*users, *reserved, BLANK]), *glued, "\n".join(words), *blanks]


_MOST_PIECES = 4000


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


def _cleaned(error: LibraryError) -> str:
    """What the library said, without the places in its source."""
    text = re.sub(r"\S+\.(cc|h)\(\d+\) ", "", str(error))
    return text.removeprefix("INTERNAL: ")[:200]
