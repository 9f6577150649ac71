"""TikTokenizer as Megatron defines it: words by class of character, then merges by rank, one at a time.

The twin of mdata/tokenizers/tiktoken/tiktoken_engine.py. Unlike GPT-2's twin it has no list of merges: any two
neighbours whose joined bytes have a rank may be merged, and a whole word that has a rank becomes one token at once.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from itertools import pairwise

# Classes: u upper or title case, l lower, b letters without case, m marks, n numbers, s blank, w other white space,
# r line ends, / itself, o the rest. The first group, if any, may be followed by a contraction.
_WORDS = {
    "v1": re.compile("[mosw/]?[ulb]+|n|s?[mo/]+r*|[swr]*r|[swr]+(?![^swr])|[swr]+"),
    "v2": re.compile("[mosw/]?[ubm]*[lbm]+|[mosw/]?[ubm]+[lbm]*|n|s?[mo/]+[r/]*|[swr]*r+|[swr]+(?![^swr])|[swr]+"),
    "o200k_base": re.compile(
        "([mosw/]?[ubm]*[lbm]+|[mosw/]?[ubm]+[lbm]*)|n{1,3}|s?[mo/]+[r/]*|[swr]*r+|[swr]+(?![^swr])|[swr]+"
    ),
    "cl100k_base": re.compile("[mosw/]?[ulb]+|n{1,3}|s?[mo/]+r*|[swr]*r|[swr]+(?![^swr])|[swr]+"),
    "llama3": re.compile("[mosw/]?[ulb]+|n{1,3}|s?[mo/]+r*|[swr]*r+|[swr]+(?![^swr])|[swr]+"),
    "qwen2": re.compile("[mosw/]?[ulb]+|n|s?[mo/]+r*|[swr]*r+|[swr]+(?![^swr])|[swr]+"),
}
_CONTRACTION = re.compile("'(?:s|t|re|ve|m|ll|d)", re.IGNORECASE)
_CONTRACTION_IS_A_WORD = ("cl100k_base", "llama3", "qwen2")
_CLASSES = {"Lu": "u", "Lt": "u", "Ll": "l", "Lm": "b", "Lo": "b"}
_NOT_WHITE = "\x1c\x1d\x1e\x1f"


def encode(text: str, *, tokens: Mapping[bytes, int], special: Mapping[str, int], pattern: str) -> list[int]:
    """The ids of a text; `special` tokens are matched in it, and none is a prefix of another."""
    names = "|".join(map(re.escape, special))
    ids = []
    for part in re.split(f"({names})", text) if names else [text]:
        if part in special:
            ids.append(special[part])
        else:
            ids += [tokens[piece] for word in words(part, pattern) for piece in _merged(word.encode(), tokens)]
    return ids


def words(text: str, pattern: str) -> Iterator[str]:
    """The words into which a pattern splits a text."""
    classes = "".join(map(_class, text))
    start = 0
    while start < len(text):
        contraction = _CONTRACTION.match(text, start) if pattern in _CONTRACTION_IS_A_WORD else None
        match = contraction or _WORDS[pattern].match(classes, start)
        assert match is not None, "every class is in a word"
        end = match.end()
        if match.lastindex and (contraction := _CONTRACTION.match(text, end)):
            end = contraction.end()
        yield text[start:end]
        start = end


def _class(character: str) -> str:
    if character in " \r\n/":
        return {" ": "s", "/": "/"}.get(character, "r")
    if character.isspace() and character not in _NOT_WHITE:
        return "w"
    kind = unicodedata.category(character)
    return _CLASSES.get(kind, {"M": "m", "N": "n"}.get(kind[0], "o"))


def _merged(word: bytes, tokens: Mapping[bytes, int]) -> list[bytes]:
    if word in tokens:
        return [word]
    parts = [word[at : at + 1] for at in range(len(word))]
    while True:
        ranks = [tokens.get(left + right) for left, right in pairwise(parts)]
        best = min((rank for rank in ranks if rank is not None), default=None)
        if best is None:
            return parts
        at = ranks.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
