"""Byte-level BPE with GPT-2's pattern by definition, one word and one merge at a time.

The twin of every engine in mdata/tokenizers/engines/libraries.py. White space is Unicode's White_Space; Python's own
definition has four more characters. Numbers and letters are those of this Python's Unicode edition.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from mdata.tokenizers.base.byte_level import from_bytes

_CONTRACTION = re.compile("'(?:[sdmt]|ll|ve|re)")
# Over the classes of characters: L letter, N number, B blank, S other white space, O the rest.
_WORD = re.compile("B?L+|B?N+|B?O+|[SB]+(?![^SB])|[SB]+")
_NOT_WHITE = "\x1c\x1d\x1e\x1f"


def encode(text: str, *, vocabulary: Mapping[str, int], merges: Sequence[str], special: Mapping[str, int]) -> list[int]:
    """The ids of a text; special tokens are matched in it, the longest first; unknown bytes are dropped."""
    ranks = {merge: rank for rank, merge in enumerate(merges)}
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    ids = []
    for part in re.split(f"({names})", text) if names else [text]:
        if part in special:
            ids.append(special[part])
        else:
            symbols = [symbol for word in words(part) for symbol in _merged(word, ranks)]
            ids += [vocabulary[symbol] for symbol in symbols if symbol in vocabulary]
    return ids


def words(text: str) -> Iterator[str]:
    """The words into which GPT-2's pattern splits a text."""
    classes = "".join(map(_class, text))
    at = 0
    while at < len(text):
        found = _CONTRACTION.match(text, at) or _WORD.match(classes, at)
        assert found is not None, "every character begins a word"
        yield text[at : found.end()]
        at = found.end()


def _class(character: str) -> str:
    if character.isspace() and character not in _NOT_WHITE:
        return "B" if character == " " else "S"
    kind = unicodedata.category(character)[0]
    return kind if kind in "LN" else "O"


def _merged(word: str, ranks: Mapping[str, int]) -> list[str]:
    parts = list(from_bytes(word.encode()))
    while True:
        pairs = [ranks.get(f"{left} {right}", len(ranks)) for left, right in pairwise(parts)]
        best = min(pairs, default=len(ranks))
        if best == len(ranks):
            return parts
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
