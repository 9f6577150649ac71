"""Streams new tokens as text: no character is split, and a stop string is found wherever tokens cut it.

A piece is returned once no later token can change it: bytes of an unfinished character and the beginning of a possible
stop string are held back. A token costs the decoding of a few tokens, not of the whole text. Not supported: a tokenizer
in which the text of a token depends on more than CONTEXT tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mdata

CONTEXT = 6  # tokens that are decoded before the new ones; SentencePiece drops the blank of a first word
UNFINISHED = 3  # bytes of a character that may lack its last one
_REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one answer.

    Args:
        prompt: ids before the first new token.
        stop: strings; the first to appear ends the text. keep_stop: see Sampling.

    Attributes:
        text: all returned text. stopped: whether a stop string has appeared, after which nothing follows.
    """

    def __init__(
        self, tokenizer: mdata.Tokenizer, prompt: Sequence[int], *, stop: Sequence[str] = (), keep_stop: bool = False
    ) -> None:
        self._tokenizer, self._stop, self._keep_stop = tokenizer, tuple(stop), keep_stop
        self._window = list(prompt[-CONTEXT:])
        self._context_text = self._decode(self._window)
        self._num_context = len(self._window)
        self._given = 0  # characters of the text of new tokens in the window that went to _held
        self._held = ""  # complete characters that may begin a stop string
        self.text, self.stopped = "", False

    def add(self, token: int, *, stops: bool = True) -> str:
        """The text that is final after one more token.

        Args:
            stops: whether stop strings count already (see Sampling.min_tokens).
        """
        assert not self.stopped, "the text has ended"
        self._window.append(token)
        fresh = self._new_text()
        pending = len(self._window) - self._num_context
        if not fresh.endswith(_REPLACEMENT) or pending > 4 * CONTEXT:
            complete = fresh
        elif pending <= UNFINISHED:
            complete = fresh[: self._given]  # bytes that are not a character alone may change those before them
        else:
            complete = _without_unfinished(fresh)
        self._held += complete[self._given :]
        self._given = max(self._given, len(complete))
        if len(complete) == len(fresh):
            self._window = self._window[-CONTEXT:]
            self._num_context, self._given = len(self._window), 0
            self._context_text = self._decode(self._window)
        return self._release(stops=stops)

    def finish(self) -> str:
        """The text that was held back, once no token follows; a stop string in it ends the text."""
        if self.stopped:
            return ""
        self._held += self._new_text()[self._given :]
        self._window, self._given = self._window[: self._num_context], 0
        piece = self._release(stops=True)
        rest, self._held = self._held, ""
        self.text += rest
        return piece + rest

    def _release(self, *, stops: bool) -> str:
        held = self._held
        at = (
            min((place for place in (held.find(text) for text in self._stop) if place >= 0), default=-1)
            if stops
            else -1
        )
        if at >= 0:
            self.stopped = True
            piece = held + self._new_text()[self._given :] if self._keep_stop else held[:at]
            self._held = ""
        else:
            length = _beginning_of_any(held, self._stop) if self._stop else 0
            piece, self._held = held[: len(held) - length], held[len(held) - length :]
        self.text += piece
        return piece

    def _new_text(self) -> str:
        text = self._decode(self._window)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decode(self._window[self._num_context :])

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids) if ids else ""


def decoded_after(tokenizer: mdata.Tokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    """The text of new tokens after a prompt, which they may join without a blank."""
    stream = TextStream(tokenizer, prompt)
    for token in new:
        stream.add(token)
    stream.finish()
    return stream.text


def _without_unfinished(text: str) -> str:
    """The text without the replacement characters at its end that may stand for an unfinished character."""
    end = len(text)
    while end and len(text) - end < UNFINISHED and text[end - 1] == _REPLACEMENT:
        end -= 1
    return text[:end]


def _beginning_of_any(text: str, stops: Sequence[str]) -> int:
    """The length of the longest end of the text that is a proper prefix of a stop string."""
    most = max(map(len, stops)) - 1
    return next((n for n in range(min(most, len(text)), 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)
