"""Long texts cut where the ids cannot notice, and the length of a word beyond which a text is refused.

Between a letter and a blank that is followed by a letter (all ASCII) every pattern we know ends a word, and
byte-level BPE never looks beyond a word. So a text of any length can be encoded in pieces of bounded memory.
What cannot be cut is one word: engines need up to 64 bytes of memory for each of its bytes, so a text with
a longer one than LONGEST_WORD_CHARS is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mdata.tokenizers.definition import AddedToken
from mdata.tokenizers.protocol import TextRefused

PIECE_CHARS = 1 << 20
LONGEST_WORD_CHARS = 4 << 20
# For tokenizers that look at a text as a whole.
LONGEST_WHOLE_CHARS = 16 << 20

_CUT = re.compile(r"[A-Za-z](?= [A-Za-z])")
# A word is of letters and numbers, of blanks, or of neither; a little wider than any pattern's words.
_LONG_WORD = re.compile(rf"\w{{{LONGEST_WORD_CHARS}}}|\s{{{LONGEST_WORD_CHARS}}}|[^\w\s]{{{LONGEST_WORD_CHARS}}}")


def can_cut(tokens: Sequence[AddedToken]) -> bool:
    """Whether no added token can lie over such a place, or care for what stands beyond it."""
    return not any(_CUT.search(token.content) or _looks_around(token) for token in tokens)


def _looks_around(token: AddedToken) -> bool:
    edges = token.content[0] + token.content[-1]
    at_a_cut = re.search("[A-Za-z ]", edges) is not None
    return at_a_cut and (token.lstrip or token.rstrip or token.single_word or " " in edges)


def cut(text: str, piece_chars: int = PIECE_CHARS) -> list[str]:
    """The text in pieces of about `piece_chars`; longer ones where there is no place to cut.

    Raises:
        TextRefused: a word is too long (the index is 0).
    """
    pieces = []
    start = 0
    while len(text) - start > piece_chars:
        place = _CUT.search(text, start + piece_chars - 1)
        if place is None:
            break
        pieces.append(text[start : place.end()])
        start = place.end()
    pieces.append(text[start:])
    if any(len(piece) >= LONGEST_WORD_CHARS and _LONG_WORD.search(piece) for piece in pieces):
        raise TextRefused(0, f"a word of more than {LONGEST_WORD_CHARS:,} characters")
    return pieces
