"""Splits long texts at places that change no id, and refuses texts with words that are too long.

Between a letter and a blank that is followed by a letter, and between a line that does not end with a blank and one
that begins with a letter (all ASCII), every known pattern ends a word, and byte-level BPE never looks beyond a word. So
a text of any length can be encoded in parts with bounded memory. A single word cannot be split: engines need up to 64
bytes of memory for each of its bytes, so a text with a word of more than LONGEST_WORD_CHARS is refused.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby

import numpy as np

from mdata.tokenizers.base.tokenizer import TextRefused, indices_in_batch
from mdata.tokenizers.base.tokenizer_json import (
    AddedToken,
    Definition,
    added_tokens,
    is_nfc_or_none,
    split_pattern,
)
from mdata.tokenizers.engines.libraries import Ids, TokenizerEngine

PART_CHARS = 1 << 20
LONGEST_WORD_CHARS = 4 << 20
# For tokenizers whose texts cannot be split.
LONGEST_WHOLE_CHARS = 16 << 20
# Length to which the tokenizer's rules may expand such a text.
LONGEST_GROWN_CHARS = 64 << 20

_BLANK = re.compile("[ \t\n\r]")
_SPLIT = re.compile(r"[A-Za-z](?= [A-Za-z])|[!-~]\n(?=[A-Za-z])")


def word_splitter(definition: Definition) -> Callable[..., Iterator[str]] | None:
    """`split_at_words`, if no added token spans such a place or depends on text beyond it; otherwise None."""
    if split_pattern(definition) is None or not is_nfc_or_none(definition):
        return None
    tokens = added_tokens(definition)
    return None if any(_SPLIT.search(token.content) or _looks_around(token) for token in tokens) else split_at_words


def whitespace_splitter(definition: Definition) -> Callable[..., Iterator[str]] | None:
    """`split_at_whitespace`, under the same condition."""
    tokens = added_tokens(definition)
    crosses_blanks = any(
        _BLANK.search(token.content) or token.lstrip or token.rstrip or token.single_word for token in tokens
    )
    return None if crosses_blanks else split_at_whitespace


def _looks_around(token: AddedToken) -> bool:
    edges = token.content[0] + token.content[-1]
    at_a_split = re.search("[A-Za-z \n]", edges) is not None
    return at_a_split and (token.lstrip or token.rstrip or token.single_word or " " in edges or "\n" in edges)


def split_at_words(text: str, part_chars: int = PART_CHARS) -> Iterator[str]:
    """The text in parts of about `part_chars`, longer if it cannot be split there.

    Raises:
        TextRefused: a word is too long (the index is 0).
    """
    start = 0
    while len(text) - start > part_chars:
        place = _SPLIT.search(text, start + part_chars - 1)
        if place is None:
            break
        yield _refuse_long_word(text[start : place.end()])
        start = place.end()
    yield _refuse_long_word(text[start:])


def _refuse_long_word(part: str) -> str:
    if len(part) >= LONGEST_WORD_CHARS and _long_word().search(part):
        raise TextRefused(0, f"a word of more than {LONGEST_WORD_CHARS:,} characters")
    return part


@cache
def _long_word() -> re.Pattern[str]:
    """A word is of letters, marks and numbers, of blanks, or of neither; slightly wider than any pattern's words."""
    classes = (rf"[\w{_marks()}]", r"\s", r"[^\w\s]")
    return re.compile("|".join(f"{kind}{{{LONGEST_WORD_CHARS}}}" for kind in classes))


def _marks() -> str:
    """Combining marks, which some patterns treat as letters, as ranges of a character class."""
    marks = [code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] == "M"]
    runs = (list(run) for _, run in groupby(enumerate(marks), lambda pair: pair[1] - pair[0]))
    return "".join(f"{chr(run[0][1])}-{chr(run[-1][1])}" for run in runs)


def split_at_whitespace(text: str, part_chars: int = PART_CHARS) -> Iterator[str]:
    """The same for tokenizers that end a word at any blank or line end, and drop it.

    A long word only costs memory there: it may be as long as a text that cannot be split.

    Raises:
        TextRefused: a word is too long (the index is 0).
    """
    start = 0
    while start < len(text):
        place = _BLANK.search(text, start + part_chars)
        end = place.start() if place else len(text)
        if end - start - part_chars > LONGEST_WHOLE_CHARS:
            raise TextRefused(0, f"a word of more than {LONGEST_WHOLE_CHARS:,} characters")
        yield text[start:end]
        start = end


def encode_long_texts(
    engine: TokenizerEngine,
    texts: Sequence[str],
    *,
    splitter: Callable[[str], Iterable[str]] | None,
    growth: float = 1.0,
) -> list[Ids]:
    """The ids of each text of a batch; long texts are split where that is safe.

    Args:
        engine: computes the ids.
        texts: of a batch.
        splitter: splits a text without changing an id; None: texts cannot be split.
        growth: how many characters the tokenizer's rules may make of one.

    Raises:
        TextRefused: a text that cannot be split is too long, or a word is.
    """
    if all(len(text) <= PART_CHARS for text in texts):
        return engine.encode(texts)
    if splitter is None:
        refuse_long(texts, growth)
    return [_encode_long(engine, text, index=index, splitter=splitter) for index, text in enumerate(texts)]


def _encode_long(
    engine: TokenizerEngine, text: str, *, index: int, splitter: Callable[[str], Iterable[str]] | None
) -> Ids:
    with indices_in_batch([index]):
        if splitter is None:
            return engine.encode([text])[0]
        # One after another: the memory of a part is freed before the next is started, and ids are stored once.
        ids = bytearray()
        for part in splitter(text):
            ids += engine.encode([part])[0].astype(np.uint32, copy=False).tobytes()
        return np.frombuffer(ids, np.uint32)


def refuse_long(texts: Sequence[str], growth: float = 1.0) -> None:
    """Raise TextRefused for a text that is too long for a tokenizer whose texts cannot be split; `growth` as above."""
    longest = min(LONGEST_WHOLE_CHARS, int(LONGEST_GROWN_CHARS / growth))
    for index, text in enumerate(texts):
        if len(text) > longest:
            reason = f"the text has {len(text):,} characters; this tokenizer accepts at most {longest:,}"
            raise TextRefused(index, reason)
