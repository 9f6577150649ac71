"""Our own engine, in C++ (mdata_cpp/punkt.hpp): linear time for any text, and no NLTK at run time.

It has a table of the characters of Unicode 14: case, letters, digits, lower case. If a newer character matters, the
running Python (for case) and the library `regex` (for letters and digits, as in NLTK) classify those in the batch, and
the batch is split again, so the result is that of NLTK on the same machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mdata.sentences.punkt_tables import SLICE_CHARS, Tables

# Flags of a character, as in mdata_cpp/punkt.hpp.
UPPER, LOWER, LETTER, DIGIT, CASED, IGNORABLE, NEWER = (1 << bit for bit in range(7))
# Lower case in editions after 14 only.
CHANGED = frozenset({0x10FC, 0xA7F2, 0xA7F3, 0xA7F4, 0xAB69})

_SIGMA, _FINAL_SIGMA = "\u03a3", "\u03c2"


def facts_of(characters: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Flags and lower case of some characters.

    The lower case of a capital sigma after a character shows whether Python counts it as cased, or ignores it.
    """
    import regex

    letter, digit = regex.compile(r"[^\W\d]").match, regex.compile(r"\d").match
    facts = {}
    for character in characters:
        flags = UPPER * character.isupper() | LOWER * character.islower()
        flags |= LETTER * bool(letter(character)) | DIGIT * bool(digit(character))
        if (character + _SIGMA).lower()[-1] == _FINAL_SIGMA:
            flags |= CASED
        elif ("A" + character + _SIGMA).lower()[-1] == _FINAL_SIGMA:
            flags |= IGNORABLE
        facts[character] = flags, character.lower()
    return facts


def newer_characters(texts: Sequence[str]) -> list[str]:
    """The characters of some texts that the C++ table lacks, and their lower case."""
    from mdata.tokenizers.base.unicode14 import unassigned

    table = unassigned()
    characters = set().union(*(text for text in texts if not text.isascii()))
    newer = {character for character in characters if table[ord(character)] or ord(character) in CHANGED}
    return sorted(newer.union(*map(str.lower, newer)))


class PunktEngine:
    """The engine; its twin is mdata/sentences/punkt_reference.py."""

    name = "mdata"

    def __init__(self, tables: Tables, *, keep_newlines: bool) -> None:
        from mdata._core import Punkt

        self._core = Punkt(
            tables.abbreviations,
            tables.collocations,
            dict(tables.contexts),
            tables.starters,
            keep_newlines=keep_newlines,
            slice_chars=SLICE_CHARS,
        )

    def split_batch(self, texts: Sequence[str]) -> tuple[list[str], list[int]]:
        """See Splitter; this engine refuses no text."""
        texts = texts if isinstance(texts, list) else list(texts)
        result = self._core.split(texts, {})
        if result is None:
            facts = facts_of(newer_characters(texts))
            result = self._core.split(texts, {ord(character): fact for character, fact in facts.items()})
        assert result is not None, "a character that Python was not asked about"
        return result
