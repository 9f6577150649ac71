"""WARC and WET files: the text records, and the fields of their headers for a filter and a template.

A record is a version line, header lines, an empty line, Content-Length bytes, and two line ends. Its text is the whole
block of a `conversion` or `resource` record of type text/plain (the records of a WET file); other records are rows that
are left out, because HTML is not text. The reader finds where records end and workers parse them, so a chunk is the
bytes of whole records; the block of a record that is too long is cut. Bytes that cannot be parsed count as damage,
because the start of the next record is unknown. Not checked: digests in headers; gzip has its own.

Slow twin: tests/reference/warc.py. Why not warcio: docs/design/dependencies.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mdata.errors import BadInputError
from mdata.sources.input_files import SourceFile
from mdata.sources.record_batch import Column, ReadSpec, RecordBatch, decoded, read_one_by_one, too_long
from mdata.sources.record_boundaries import DecompressedText
from mdata.sources.record_texts import filled_text, is_kept

TEXT = "text"
_LONGEST_HEADER = 1 << 20
_SCAN_BYTES = 1 << 12
# A block that is too long is cut this much beyond the limit, which shows that it is too long.
_OVERHANG = 1
_TEXT_TYPES = ("conversion", "resource")
_HEADER_END = re.compile(rb"\r?\n\r?\n")
_LINE_END = re.compile(rb"\r?\n(?![ \t])")


@dataclass(frozen=True)
class RecordHeader:
    """The header of a record: its fields by their names in lower case, and the size of its block in bytes."""

    fields: dict[str, str]
    block_bytes: int

    @property
    def is_text(self) -> bool:
        """Whether the block is a text."""
        kind = self.fields.get("content-type", "").partition(";")[0].strip().lower()
        return self.fields.get("warc-type", "").lower() in _TEXT_TYPES and kind == "text/plain"


class NotARecord(Exception):
    """Bytes that are not the header of a record; the message says why."""


def parse_header(data: bytes) -> RecordHeader:
    """Parse the header of a record, without the empty line after it.

    Raises:
        NotARecord: no version line, a line without a colon, or no usable Content-Length.
    """
    first, *lines = _LINE_END.split(data)
    if not first.startswith(b"WARC/"):
        raise NotARecord(f"{first[:40]!r} in place of WARC/1.0")
    fields: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.decode(errors="replace").partition(":")
        if not colon:
            raise NotARecord(f"the header line {line[:40]!r} has no colon")
        fields.setdefault(name.strip().lower(), " ".join(value.split()))
    size = fields.get("content-length", "")
    if not (size.isascii() and size.isdecimal() and len(size) < 19):
        raise NotARecord(f"Content-Length {size[:40]!r} is not a number of bytes" if size else "no Content-Length")
    return RecordHeader(fields, int(size))


def record_spans(text: DecompressedText, file: SourceFile, *, longest: int) -> Iterator[tuple[int, bytes]]:
    """Where each record begins, and its header, empty line and block; a block that is too long is cut.

    Raises:
        BadInputError: the bytes are not a record, or end inside one.
    """
    at = number = 0
    while text.read(at := _without_line_ends(text, at), 1):
        number += 1
        try:
            fields, head_bytes = _header_bytes(text, at)
            header = parse_header(fields)
        except NotARecord as error:
            raise _damage(file, number, at, str(error)) from error
        block_bytes = min(header.block_bytes, longest + _OVERHANG)
        data = text.read(at, head_bytes + block_bytes)
        start, stop = at, at + head_bytes + header.block_bytes
        at += len(data)
        while at < stop and (more := text.read(at, min(stop - at, 1 << 16))):
            at += len(more)
            text.drop(at)
        if at < stop:
            raise _damage(file, number, at, f"it ends {stop - at:,} bytes before the record does")
        yield start, data
        text.drop(at)


def _header_bytes(text: DecompressedText, at: int) -> tuple[bytes, int]:
    """A header, and its size with the empty line that ends it."""
    size = _SCAN_BYTES
    while True:
        data = text.read(at, size)
        if end := _HEADER_END.search(data):
            return data[: end.start()], end.end()
        if not data.startswith(b"WARC/"):
            raise NotARecord(f"{data[:40]!r} in place of WARC/1.0")
        if len(data) < size:
            raise NotARecord("it ends inside of a header")
        if size >= _LONGEST_HEADER:
            raise NotARecord(f"a header longer than {_LONGEST_HEADER:,} bytes")
        size *= 4


def _without_line_ends(text: DecompressedText, at: int) -> int:
    """The first byte from an offset on that is not a line end."""
    while data := text.read(at, _SCAN_BYTES):
        rest = data.lstrip(b"\r\n")
        at += len(data) - len(rest)
        text.drop(at)
        if rest:
            break
    return at


def _damage(file: SourceFile, number: int, at: int, reason: str) -> BadInputError:
    return BadInputError(
        f"{file.path}: the WARC data is damaged at record {number:,} (byte {at:,} of the text)",
        found=reason,
        fix="download or write the file again",
    )


def records(data: bytes, *, longest: int) -> Iterator[tuple[RecordHeader, bytes]]:
    """The records of a chunk; a block that is longer than `longest` was cut."""
    at = 0
    while at < len(data):
        header_end = _HEADER_END.search(data, at)
        assert header_end is not None, "a chunk holds whole records"
        header = parse_header(data[at : header_end.start()])
        block = data[header_end.end() : header_end.end() + min(header.block_bytes, longest + _OVERHANG)]
        at = header_end.end() + len(block)
        yield header, block


def parse_records(data: bytes, spec: ReadSpec) -> RecordBatch:
    """The text records of a chunk, and the bad rows."""

    def text_of(record: tuple[RecordHeader, bytes]) -> str | None:
        header, block = record
        return _text_of(header, block, spec) if header.is_text else None

    return read_one_by_one(
        records(data, longest=spec.max_record_bytes),
        text_of,
        spec,
        columns=lambda texts: (Column(texts, None),),
        line_of=lambda record: record[1],
    )


def _text_of(header: RecordHeader, block: bytes, spec: ReadSpec) -> str | None:
    """The text of a record; None: it is filtered out."""

    def look_up(name: str) -> Any:
        if name == TEXT:
            return _block_text(block, spec)
        return header.fields[name.lower()]

    if not is_kept(look_up, spec):
        return None
    return filled_text(spec.template, look_up) if spec.template else _block_text(block, spec)


def _block_text(block: bytes, spec: ReadSpec) -> str:
    if len(block) > spec.max_record_bytes:
        raise too_long(spec)
    return decoded(block)
