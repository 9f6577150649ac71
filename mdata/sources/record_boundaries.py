"""Where records begin: the one rule by which plain files and streams are cut alike.

A line ends at LF, CR LF or a lone CR, as in Python's text files. A paragraph ends where two line ends follow
each other, that is, at an empty line; a line of blanks is not empty. Everything is found by looking at bytes
near a place, never further than asked, so that one line of any length costs bounded memory and is looked at
a bounded number of times.

Slow twin: mdata/reference/sources.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

_SCAN_BYTES = 1 << 16
_EMPTY_LINES = re.compile(rb"(?>\r\n|\r|\n){2,}")
# A cut record must still show that it is too long when line ends (at most CR LF) are taken off its end;
# and a scan near its limit moves on only if this is larger than any look_back.
OVERHANG = 4


class Text(Protocol):
    """Unpacked text that can be looked at anywhere, or from some place on."""

    def read(self, place: int, size: int) -> bytes:
        """The bytes [place, place + size); fewer at the end of the text only."""


@dataclass(frozen=True)
class Rule:
    """How records follow each other: `breaks(data)` gives the places after each break, `look_back` its largest
    number of bytes.
    """

    breaks: Callable[[bytes], Iterator[int]]
    look_back: int


def _line_breaks(data: bytes) -> Iterator[int]:
    place = 0
    while True:
        feed, carriage = data.find(b"\n", place), data.find(b"\r", place)
        if feed < 0 and carriage < 0:
            return
        if carriage < 0 or 0 <= feed < carriage:
            place = feed + 1
        else:
            place = carriage + (2 if feed == carriage + 1 else 1)
        yield place


def _paragraph_breaks(data: bytes) -> Iterator[int]:
    return (match.end() for match in _EMPTY_LINES.finditer(data))


LINES = Rule(_line_breaks, 1)
# Three bytes show two line ends before a place: at worst CR LF CR LF without its first byte.
PARAGRAPHS = Rule(_paragraph_breaks, 3)


def record_start(text: Text, place: int, *, limit: int, rule: Rule) -> int:
    """The first place in [place, limit) where a record begins; else `limit`, or the end of the text before it."""
    at = place - rule.look_back
    while True:
        # As if line ends stood before the text, so that its first record begins like every other.
        before = b"\n" * min(max(-at, 0), rule.look_back)
        wanted = min(_SCAN_BYTES, max(limit - at, 0) + OVERHANG)
        data = before + text.read(max(at, 0), wanted)
        at_end = len(data) - len(before) < wanted
        for end in rule.breaks(data):
            # A break at the very end of what was read may go on behind it.
            if at + end >= place and (at_end or end < len(data)):
                return min(at + end, limit)
        if at_end:
            return min(at + len(data), limit)
        at += len(data) - rule.look_back
        if at >= limit:
            return limit


def without_blank_end(data: bytes, longest: int) -> bytes:
    """Whole lines up to the end of a text without a blank last one, which is not a record.

    A blank line is ASCII white space of at most `longest` bytes. Of several at the end the last alone goes: what
    becomes of a line then depends on it and on whether it is the last, not on where the text was cut.
    """
    filled = len(data.rstrip())
    blank = data[filled:].splitlines(keepends=True)
    # What follows text on a line is the end of that line.
    if len(blank) > bool(filled) and len(blank[-1]) <= longest:
        return data[: len(data) - len(blank[-1])]
    return data


def piece_span(text: Text, start: int, *, stop: int, rule: Rule, longest: int) -> tuple[int, int]:
    """First and last byte of the records that begin in [start, stop); the last one is cut where it is too long."""
    first = record_start(text, start, limit=stop, rule=rule)
    if first >= stop:
        return first, first
    return first, record_start(text, stop, limit=stop + longest + OVERHANG, rule=rule)
