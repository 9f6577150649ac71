"""Long texts cut where the ids cannot notice, and the length of a word beyond which a text is refused.

Between a letter and a blank that is followed by a letter, and between a line that ends with no blank and one that
begins with a letter (all ASCII), every pattern we know ends a word, and byte-level BPE never looks beyond a word. So a
text of any length can be encoded in pieces of bounded memory. What cannot be cut is one word: engines need up to 64
bytes of memory for each of its bytes, so a text with a longer one than LONGEST_WORD_CHARS is refused by name.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby

import numpy as np

from mdata.tokenizers.base.tokenizer import TextRefused, numbered
from mdata.tokenizers.base.tokenizer_json import AddedToken
from mdata.tokenizers.engines.libraries import Engine, Ids

PIECE_CHARS = 1 << 20
LONGEST_WORD_CHARS = 4 << 20
# For tokenizers that look at a text as a whole.
LONGEST_WHOLE_CHARS = 16 << 20
# To which rules of the tokenizer may make such a text grow.
LONGEST_GROWN_CHARS = 64 << 20

_BLANK = re.compile("[ \t\n\r]")
_CUT = re.compile(r"[A-Za-z](?= [A-Za-z])|[!-~]\n(?=[A-Za-z])")


def can_cut(tokens: Sequence[AddedToken]) -> bool:
    """Whether no added token can lie over such a place, or care for what stands beyond it."""
    return not any(_CUT.search(token.content) or _looks_around(token) for token in tokens)


def _looks_around(token: AddedToken) -> bool:
    edges = token.content[0] + token.content[-1]
    at_a_cut = re.search("[A-Za-z \n]", edges) is not None
    return at_a_cut and (token.lstrip or token.rstrip or token.single_word or " " in edges or "\n" in edges)


def cut(text: str, piece_chars: int = PIECE_CHARS) -> Iterator[str]:
    """The text in pieces of about `piece_chars`; longer ones where there is no place to cut.

    Raises:
        TextRefused: a word is too long (the index is 0).
    """
    start = 0
    while len(text) - start > piece_chars:
        place = _CUT.search(text, start + piece_chars - 1)
        if place is None:
            break
        yield _checked(text[start : place.end()])
        start = place.end()
    yield _checked(text[start:])


def _checked(piece: str) -> str:
    if len(piece) >= LONGEST_WORD_CHARS and _long_word().search(piece):
        raise TextRefused(0, f"a word of more than {LONGEST_WORD_CHARS:,} characters")
    return piece


@cache
def _long_word() -> re.Pattern[str]:
    """A word is of letters, marks and numbers, of blanks, or of neither; a little wider than any pattern's words."""
    classes = (rf"[\w{_marks()}]", r"\s", r"[^\w\s]")
    return re.compile("|".join(f"{kind}{{{LONGEST_WORD_CHARS}}}" for kind in classes))


def _marks() -> str:
    """Combining marks, which some patterns count among the letters, as ranges of a character class."""
    marks = [code for code in range(sys.maxunicode + 1) if unicodedata.category(chr(code))[0] == "M"]
    runs = (list(run) for _, run in groupby(enumerate(marks), lambda pair: pair[1] - pair[0]))
    return "".join(f"{chr(run[0][1])}-{chr(run[-1][1])}" for run in runs)


def cut_at_blanks(text: str, piece_chars: int = PIECE_CHARS) -> Iterator[str]:
    """The same for tokenizers to which any blank or line end is the end of a word, and which drop it.

    A long word costs them little, but memory: it may have as many characters as a text that is looked at as a whole.

    Raises:
        TextRefused: a word is too long (the index is 0).
    """
    start = 0
    while start < len(text):
        place = _BLANK.search(text, start + piece_chars)
        end = place.start() if place else len(text)
        if end - start - piece_chars > LONGEST_WHOLE_CHARS:
            raise TextRefused(0, f"a word of more than {LONGEST_WHOLE_CHARS:,} characters")
        yield text[start:end]
        start = end


def can_cut_at_blanks(tokens: Sequence[AddedToken]) -> bool:
    """Whether no added token can lie over such a place, or care for what stands beyond it."""
    return not any(
        _BLANK.search(token.content) or token.lstrip or token.rstrip or token.single_word for token in tokens
    )


def encode_in_pieces(
    engine: Engine,
    texts: Sequence[str],
    *,
    cutter: Callable[[str], Iterable[str]] | None = cut,
    growth: float = 1.0,
) -> list[Ids]:
    """The ids of each text, long ones in pieces where that is safe.

    Args:
        engine: that gives them.
        texts: of a batch.
        cutter: cuts a text where no id can notice; None: texts are looked at as a whole.
        growth: how many characters the tokenizer's rules may make of one.

    Raises:
        TextRefused: a text that cannot be cut is too long, or a word is.
    """
    if all(len(text) <= PIECE_CHARS for text in texts):
        return engine.encode(texts)
    if cutter is None:
        refuse_long(texts, growth)
    return [_encode_long(engine, text, index=index, cutter=cutter) for index, text in enumerate(texts)]


def _encode_long(engine: Engine, text: str, *, index: int, cutter: Callable[[str], Iterable[str]] | None) -> Ids:
    with numbered([index]):
        if cutter is None:
            return engine.encode([text])[0]
        # One after another: the memory of a piece is free again before the next is begun, and ids are held once.
        ids = bytearray()
        for piece in cutter(text):
            ids += engine.encode([piece])[0].astype(np.uint32, copy=False).tobytes()
        return np.frombuffer(ids, np.uint32)


def refuse_long(texts: Sequence[str], growth: float = 1.0) -> None:
    """Raise TextRefused for a text that is too long for what looks at it as a whole; `growth` as above."""
    longest = min(LONGEST_WHOLE_CHARS, int(LONGEST_GROWN_CHARS / growth))
    for number, text in enumerate(texts):
        if len(text) > longest:
            reason = f"the text has {len(text):,} characters; this tokenizer accepts at most {longest:,}"
            raise TextRefused(number, reason)
