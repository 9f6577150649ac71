"""Where records begin: the one rule by which plain files and streams are divided into chunks.

A line ends at LF, CR LF or a lone CR, as in Python's text files. A paragraph ends at an empty line, that is, at two
consecutive line ends; a line of blanks is not empty. Everything is found by reading bytes near an offset, never further
than requested, so that one line of any length costs bounded memory and is scanned a bounded number of times.

Slow twin: tests/reference/sources.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from mdata.sources.input_files import Format
from mdata.sources.record_batch import ReadSpec

_SCAN_BYTES = 1 << 16
_EMPTY_LINES = re.compile(rb"(?>\r\n|\r|\n){2,}")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A truncated record must still be too long after removing its line end (at most CR LF); and a scan near its limit
# advances only if this is larger than any look_back.
_OVERHANG = 4


class SeekableText(Protocol):
    """Decompressed text that can be read at any offset, or at any offset that was not dropped."""

    def read(self, offset: int, size: int) -> bytes:
        """The bytes [offset, offset + size); fewer at the end of the text only."""


class DecompressedText(SeekableText, Protocol):
    """Decompressed text that is read from its beginning to its end."""

    def drop(self, offset: int) -> None:
        """Drop the buffer before an offset."""


@dataclass(frozen=True)
class Rule:
    """What separates records.

    Attributes:
        breaks: from some bytes to the offsets after each break in them.
        look_back: the bytes before an offset that show whether a break ends there.
    """

    breaks: Callable[[bytes], Iterator[int]]
    look_back: int


def _line_breaks(data: bytes) -> Iterator[int]:
    at = 0
    while True:
        feed, carriage = data.find(b"\n", at), data.find(b"\r", at)
        if feed < 0 and carriage < 0:
            return
        if carriage < 0 or 0 <= feed < carriage:
            at = feed + 1
        else:
            at = carriage + (2 if feed == carriage + 1 else 1)
        yield at


def _paragraph_breaks(data: bytes) -> Iterator[int]:
    return (match.end() for match in _EMPTY_LINES.finditer(data))


LINES = Rule(_line_breaks, 1)
# Three bytes show two line ends before an offset: at worst CR LF CR LF without its first byte.
PARAGRAPHS = Rule(_paragraph_breaks, 3)
MOST_LOOK_BACK = 3


def read_span(text: SeekableText, start: int, *, stop: int, format: Format, spec: ReadSpec) -> bytes:
    """The records of a text that begin in [start, stop); the last one is cut if it is too long."""
    rule = PARAGRAPHS if format == "text" else LINES
    first, last = chunk_span(text, start, stop=stop, rule=rule, longest=spec.max_record_bytes)
    data = text.read(first, last - first)
    if format == "text":
        return data.removeprefix(_BYTE_ORDER_MARK) if start == 0 else data
    return data if text.read(last, 1) else _without_blank_end(data, spec.max_record_bytes)


def read_start(text: SeekableText, spec: ReadSpec) -> bytes:
    """A plain text that is one document, without its byte order mark; cut if it is too long."""
    return text.read(0, spec.max_record_bytes + _OVERHANG).removeprefix(_BYTE_ORDER_MARK)


def chunk_span(text: SeekableText, start: int, *, stop: int, rule: Rule, longest: int) -> tuple[int, int]:
    """The byte range of the records that begin in [start, stop); the last one is cut if it is too long."""
    first = _record_start(text, start, limit=stop, rule=rule)
    if first >= stop:
        return first, first
    return first, _record_start(text, stop, limit=stop + longest + _OVERHANG, rule=rule)


def _record_start(text: SeekableText, offset: int, *, limit: int, rule: Rule) -> int:
    """The first offset in [offset, limit) at which a record begins; else `limit`, or an earlier end of the text."""
    at = offset - rule.look_back
    while True:
        # Treat the text as if line ends preceded it, so that its first record begins like every other.
        before = b"\n" * min(max(-at, 0), rule.look_back)
        wanted = min(_SCAN_BYTES, max(limit - at, 0) + _OVERHANG)
        data = before + text.read(max(at, 0), wanted)
        at_end = len(data) - len(before) < wanted
        for end in rule.breaks(data):
            # A break at the very end of the bytes read may continue after them.
            if at + end >= offset and (at_end or end < len(data)):
                return min(at + end, limit)
        if at_end:
            return min(at + len(data), limit)
        at += len(data) - rule.look_back
        if at >= limit:
            return limit


def _without_blank_end(data: bytes, longest: int) -> bytes:
    """Whole lines up to the end of a text without a blank last one, which is not a record.

    A blank line is ASCII white space of at most `longest` bytes. Of several at the end only the last is dropped: the
    result for a line then depends only on the line and on whether it is the last, not on where the text was cut.
    """
    filled = len(data.rstrip())
    blank = data[filled:].splitlines(keepends=True)
    # The bytes after text on a line are the end of that line.
    if len(blank) > bool(filled) and len(blank[-1]) <= longest:
        return data[: len(data) - len(blank[-1])]
    return data
