"""What the splitter asks of a character: its case, whether it is a letter or a digit, what `lower` makes of it.

Case is that of the running Python; letters and digits are those of the `regex` library, as in NLTK. The C++ engine has
a table of this, but editions of Unicode differ in newer characters: for those it is told what is said here. Flags are
the ones of mdata_cpp/punkt.hpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

UPPER, LOWER, LETTER, DIGIT, CASED, IGNORABLE, NEWER = (1 << bit for bit in range(7))
# Small letters to editions after 14 only.
CHANGED = frozenset({0x10FC, 0xA7F2, 0xA7F3, 0xA7F4, 0xAB69})

_SIGMA, _FINAL_SIGMA = "\u03a3", "\u03c2"


def facts_of(characters: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Flags and lower case of some characters.

    How a capital sigma is lowered tells which characters Python takes for cased, and which it looks past.
    """
    import regex

    letter, digit = regex.compile(r"[^\W\d]").match, regex.compile(r"\d").match
    found = {}
    for character in characters:
        flags = UPPER * character.isupper() | LOWER * character.islower()
        flags |= LETTER * bool(letter(character)) | DIGIT * bool(digit(character))
        if (character + _SIGMA).lower()[-1] == _FINAL_SIGMA:
            flags |= CASED
        elif ("A" + character + _SIGMA).lower()[-1] == _FINAL_SIGMA:
            flags |= IGNORABLE
        found[character] = flags, character.lower()
    return found


def newer_characters(texts: Sequence[str]) -> list[str]:
    """The characters of some texts that the table in C++ does not know, and what they are in lower case."""
    from mdata.tokenizers.base.unicode14 import unassigned

    table = unassigned()
    found = set().union(*(text for text in texts if not text.isascii()))
    newer = {character for character in found if table[ord(character)] or ord(character) in CHANGED}
    return sorted(newer.union(*map(str.lower, newer)))
