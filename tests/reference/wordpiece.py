"""WordPiece with BERT's normalizer and pre-tokenizer, one step after another.

The twin of mdata_cpp/wordpiece.hpp. Classes of characters are those that `mdata._core.WordPiece.classes()` gives
(Unicode 8); decomposition and lower case are this Python's, which differ on `unsettled` characters only.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

# Name of a class -> its characters.
Classes = Mapping[str, frozenset[str]]


def words(text: str, *, treatment: tuple[bool, bool, bool, bool], classes: Classes) -> list[str]:
    """The words of a text that are looked up; treatment: clean, separate CJK, drop accents, lower case."""
    clean, cjk, strip, lower = treatment
    if clean:
        text = "".join(" " if c in classes["blank"] else c for c in text if c not in classes["dropped"])
    if cjk:
        text = "".join(f" {c} " if c in classes["cjk"] else c for c in text)
    if strip:
        text = "".join(c for c in unicodedata.normalize("NFD", text) if c not in classes["accent"])
    if lower:
        # Character by character, so that a sigma at the end of a word is not special.
        text = "".join(c.lower() for c in text)
    text = "".join(" " if c in classes["space_in_pretokenizer"] else c for c in text)
    text = "".join(f" {c} " if c in classes["punctuation"] else c for c in text)
    return [word for word in text.split(" ") if word]


def pieces(word: str, *, vocabulary: Mapping[str, int], unknown: int, prefix: str, most_chars: int) -> list[int]:
    """The longest entry that starts a word, then the longest that continues it, and so on; or the unknown entry."""
    ids: list[int] = []
    start = 0
    while start < len(word) <= most_chars:
        names = ((prefix if start else "") + word[start:end] for end in range(len(word), start, -1))
        longest = next((name for name in names if name in vocabulary), None)
        if longest is None:
            return [unknown]
        ids.append(vocabulary[longest])
        start += len(longest) - (len(prefix) if start else 0)
    return ids or [unknown]


def around_tokens(text: str, added: Mapping[str, int]) -> list[str]:
    """The parts of a text between added tokens, and the tokens, the longest at each position; -1: text."""
    names = "|".join(re.escape(name) for name in sorted(added, key=len, reverse=True))
    parts = [""]
    for part in re.split(f"({names})", text) if names else [text]:
        if added.get(part, -1) >= 0:
            parts += [part, ""]
        else:
            parts[-1] += part
    return parts
