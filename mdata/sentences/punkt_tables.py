"""The four tables of a Punkt language: words counted by NLTK, as text files.

Abbreviations and sentence starters have one entry per line, collocations two words separated by a tab, contexts a word,
a tab and a sum of bits. Entries are compared with lower-case text. NLTK accepts any lines; here a line that NLTK could
not use, or would read as two, is refused. The last line may lack its end, as in NLTK's own files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mdata.errors import UsageError
from mdata.tokenizers.base.helpers import decode_text

ABBREVIATIONS, COLLOCATIONS, CONTEXTS, STARTERS = FILES = (
    "abbrev_types.txt",
    "collocations.tab",
    "ortho_context.tab",
    "sent_starters.txt",
)
MAX_BYTES = 64 << 20
# Megatron's tool first splits a longer text every 1,000,000 characters, so a sentence across such a position becomes
# two.
SLICE_CHARS = 1_000_000
# Bits of a context: upper case at the start of a sentence, inside, unknown; then the same of lower case.
START_UPPER, INSIDE_UPPER, UNKNOWN_UPPER, START_LOWER, INSIDE_LOWER, UNKNOWN_LOWER = (1 << bit for bit in range(1, 7))
UPPER = START_UPPER | INSIDE_UPPER | UNKNOWN_UPPER
LOWER = START_LOWER | INSIDE_LOWER | UNKNOWN_LOWER
MAX_BITS = 127

# Characters besides the line feed that end a line for NLTK's reader.
_OTHER_LINE_ENDS = re.compile("[\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")


@dataclass(frozen=True)
class Tables:
    """The tables that decide where a language's sentences end.

    Attributes:
        abbreviations: without their final period.
        collocations: (word before the period, word after it).
        contexts: word -> the contexts in which it was seen.
        starters: words that often begin a sentence.
    """

    abbreviations: frozenset[str]
    collocations: frozenset[tuple[str, str]]
    contexts: Mapping[str, int]
    starters: frozenset[str]


def read_tables(files: Mapping[str, bytes], folder: str = "") -> Tables:
    """Parse the content of the four files.

    Args:
        files: by their names, FILES.
        folder: of the files, for messages; ends with a separator.

    Raises:
        UsageError: an invalid line; names it.
    """
    collocations = _pairs(files[COLLOCATIONS], folder + COLLOCATIONS)
    contexts = _pairs(files[CONTEXTS], folder + CONTEXTS)
    return Tables(
        abbreviations=frozenset(_lines(files[ABBREVIATIONS], folder + ABBREVIATIONS)),
        collocations=frozenset(collocations),
        contexts=_bit_sums(contexts, folder + CONTEXTS),
        starters=frozenset(_lines(files[STARTERS], folder + STARTERS)),
    )


def _lines(content: bytes, name: str) -> list[str]:
    text = decode_text(content, name)
    if found := _OTHER_LINE_ENDS.search(text):
        number = text.count("\n", 0, found.start()) + 1
        raise UsageError(
            f"{name}:{number}: a line may end with a line feed only",
            found=repr(found.group()),
            fix="copy the file again, without changing its line ends",
        )
    lines = text.split("\n")
    if not lines[-1]:
        del lines[-1]
    if "" in lines:
        raise UsageError(f"{name}:{lines.index('') + 1}: an empty line", expected="an entry")
    return lines


def _pairs(content: bytes, name: str) -> list[tuple[str, str]]:
    lines = _lines(content, name)
    pairs = [(left, right) for left, tab, right in (line.partition("\t") for line in lines) if tab and right]
    if len(pairs) != len(lines) or any("\t" in right for _, right in pairs):
        number, line = next(_not_pairs(lines))
        expected = "two entries with one tab between"
        raise UsageError(f"{name}:{number}: not a pair", found=repr(line[:80]), expected=expected)
    return pairs


def _not_pairs(lines: list[str]) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, 1):
        parts = line.split("\t")
        if len(parts) != 2 or not parts[1]:
            yield number, line


def _bit_sums(pairs: list[tuple[str, str]], name: str) -> dict[str, int]:
    known = {str(bits): bits for bits in range(MAX_BITS + 1)}
    try:
        return {word: known[bits] for word, bits in pairs}
    except KeyError:
        number, bits = next((number, bits) for number, (_, bits) in enumerate(pairs, 1) if bits not in known)
        raise UsageError(
            f"{name}:{number}: not a sum of the context bits",
            found=repr(bits[:80]),
            expected=f"a whole number from 0 to {MAX_BITS}",
        ) from None
