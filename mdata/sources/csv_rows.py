"""CSV and TSV files: rows under a first row of names, as RFC 4180 and Python's csv module read them.

A field that begins with a quote ends at the next quote that is not doubled, and may hold line ends; a quote inside of
other fields is a character. A row ends at LF or CR LF. So a file can only be read from its beginning: the reader finds
where rows end, and workers parse them with the csv module. A chunk is the row of names and whole rows.

All values are text. A filter that compares a column with a number or a boolean reads its text as one, and an empty
field as null. Not done: guessing the delimiter, files without names, other quotes and escapes.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from mdata.errors import UsageError
from mdata.sources.input_files import SourceFile
from mdata.sources.record_batch import BadRecord, Column, ReadSpec, RecordBatch, decoded, read_one_by_one, too_long
from mdata.sources.record_boundaries import DecompressedText
from mdata.sources.record_texts import filled_text, is_kept

DELIMITERS = {"csv": ",", "tsv": "\t"}
_SCAN_BYTES = 1 << 16
# A quoted field, with its end if that is there, or the end of a row.
_EVENTS = {
    name: re.compile(rb'(?<![^%b\n])"(?:[^"]++|"")*+("?)|\n' % delimiter.encode())
    for name, delimiter in DELIMITERS.items()
}
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LONGEST_FIELD = (1 << 31) - 1


def row_spans(text: DecompressedText, file: SourceFile, *, spec: ReadSpec) -> Iterator[tuple[int, bytes]]:
    """Where whole rows begin, and their bytes, many rows at a time; first the row of names.

    A row that is too long is cut, without the line ends in it, and ends with the line in which it becomes too long.

    Raises:
        UsageError: there are no names, or not those that the spec needs.
    """
    at, size, has_names = 0, _SCAN_BYTES, False
    longest = spec.max_record_bytes
    while True:
        data = text.read(at, size)
        at_end = len(data) < size
        if not data:
            return
        stop = _first_end(data, file.format) if not has_names else _last_end(data, file.format)
        if not stop and at_end:
            stop = len(data)
        if not stop and size <= longest:
            size *= 4
            continue
        start = at
        if stop:
            rows, at = data[:stop], at + stop
        else:
            rows = re.sub(rb'[\r\n"]', b" ", data[: longest + 1]) + b"\n"
            at = _line_end(text, at + longest)
        if not has_names:
            _check_names(rows, file, spec)
            has_names = True
            rows = rows if rows.endswith(b"\n") else rows + b"\n"
        yield start, rows
        text.drop(at)
        size = _SCAN_BYTES


def _first_end(data: bytes, format: str) -> int:
    return next((match.end() for match in _EVENTS[format].finditer(data) if match[0] == b"\n"), 0)


def _last_end(data: bytes, format: str) -> int:
    """Where the last row that ends in the bytes does; they begin with a row."""
    if b'"' not in data:
        return data.rfind(b"\n") + 1
    end = 0
    for match in _EVENTS[format].finditer(data):
        if match[0] == b"\n":
            end = match.end()
        elif not match[1]:
            break
    return end


def _line_end(text: DecompressedText, at: int) -> int:
    while data := text.read(at, _SCAN_BYTES):
        if (end := data.find(b"\n")) >= 0:
            return at + end + 1
        at += len(data)
        text.drop(at)
    return at


def _check_names(row: bytes, file: SourceFile, spec: ReadSpec) -> None:
    try:
        text = decoded(row.removeprefix(b"\xef\xbb\xbf"))
        (names,) = csv.reader([text], delimiter=DELIMITERS[file.format], strict=True)
    except (csv.Error, BadRecord, ValueError) as error:
        raise UsageError(f"{file.path}: the first row has no names of columns", found=str(error)) from error
    needed = [name for name, optional in spec.text_columns.items() if not optional]
    needed += [name for name, _ in spec.where.columns] if spec.where else []
    for name in needed:
        if (count := names.count(name)) != 1:
            of_text = "--text-template" if spec.template is not None else spec.key_option
            raise UsageError(
                f"{file.path}: {f'{count} columns' if count else 'no column'} {name!r}",
                found=", ".join(repr(name[:40]) for name in names[:10]),
                expected="names of columns in the first row",
                fix=f"name another column in {of_text if name in spec.text_columns else '--where'}",
            )


def _split_rows(data: bytes, format: str) -> list[bytes]:
    """Rows without their line ends."""
    if b'"' not in data:
        rows = data.split(b"\n")
    else:
        ends = [match.end() for match in _EVENTS[format].finditer(data) if match[0] == b"\n"]
        bounds = [0, *ends, len(data)]
        rows = [data[start:stop].removesuffix(b"\n") for start, stop in pairwise(bounds)]
    if rows and not rows[-1]:
        rows.pop()
    return [row.removesuffix(b"\r") for row in rows]


def parse_rows(format: str, data: bytes, spec: ReadSpec) -> RecordBatch:
    """The records of a chunk, and the bad rows."""
    names_row, *rows = _split_rows(data.removeprefix(b"\xef\xbb\xbf"), format) or [b""]
    limit = csv.field_size_limit(_LONGEST_FIELD)
    try:
        (names,) = csv.reader([names_row.decode()], delimiter=DELIMITERS[format])
        columns = _all_good(rows, names, format, spec)
        return RecordBatch(len(rows), None, columns, []) if columns else _one_by_one(rows, names, format, spec)
    finally:
        csv.field_size_limit(limit)


def _all_good(rows: Sequence[bytes], names: list[str], format: str, spec: ReadSpec) -> tuple[Column, ...] | None:
    """The columns, without Python code for each row; None if any row may be bad."""
    if not rows or spec.template or spec.where or max(map(len, rows)) > spec.max_record_bytes:
        return None
    try:
        values = list(csv.reader([row.decode() for row in rows], delimiter=DELIMITERS[format], strict=True))
    except (csv.Error, UnicodeDecodeError):
        return None
    if len(values) != len(rows) or any(len(value) != len(names) for value in values):
        return None
    places = [names.index(key) for key in spec.json_keys]
    return tuple(Column([value[place] for value in values], None) for place in places)


def _one_by_one(rows: Sequence[bytes], names: list[str], format: str, spec: ReadSpec) -> RecordBatch:
    def columns(records: list[list[str]]) -> tuple[Column, ...]:
        return tuple(Column([texts[i] for texts in records], None) for i in range(len(spec.json_keys)))

    return read_one_by_one(rows, lambda row: _record(row, names, format, spec), spec, columns=columns, line_of=bytes)


def _record(row: bytes, names: list[str], format: str, spec: ReadSpec) -> list[str] | None:
    """The texts of a row; None: it is filtered out."""
    if len(row) > spec.max_record_bytes:
        raise too_long(spec)
    text = decoded(row)
    if not text:
        raise BadRecord("blank", "blank line")
    try:
        (values,) = csv.reader([text], delimiter=DELIMITERS[format], strict=True)
    except (csv.Error, ValueError) as error:
        raise BadRecord("not-csv", f"not {format.upper()}: {error}") from error
    if len(values) != len(names):
        raise BadRecord("not-csv", f"fields: {len(values)}, names of columns: {len(names)}")
    fields = dict(zip(names, values, strict=True))
    kinds = dict(spec.where.columns) if spec.where else {}
    if not is_kept(lambda name: _typed(fields[name], kinds.get(name)), spec):
        return None
    if spec.template is not None:
        return [filled_text(spec.template, fields.__getitem__)]
    return [fields[key] for key in spec.json_keys]


def _typed(text: str, kind: str | None) -> Any:
    """A field as the type that a filter compares it with; text that cannot be converted stays, and is refused there."""
    if kind == "text":
        return text
    if not text:
        return None
    if kind == "a boolean":
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind == "a number" and _NUMBER.fullmatch(text):
        return int(text) if text.lstrip("-").isdecimal() and len(text) < 20 else float(text)
    return text
