"""From lines to records: Python's dialect of JSON, strict UTF-8, and a reason for every line that cannot be
taken.

Rows count from 1 inside the block that is parsed; who reads blocks in order adds the rows before it. The
dialect is that of `json.loads` on text: NaN, Infinity and repeated keys (the last counts) are fine; a byte
order mark, raw control characters and blank lines are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mdata.errors import BadInputError
from mdata.sources.files import SourceFile, check_unchanged
from mdata.sources.units import blocks, plan_units

# What a single reader takes at once: large enough for the disk, small beside any machine's memory.
_READ_BYTES = 1 << 22
_EXCERPT_CHARACTERS = 80


@dataclass(frozen=True)
class Record:
    """One line: its row (from 1) and, for each key, its sentences (a plain string is one)."""

    row: int
    texts: tuple[list[str], ...]


@dataclass(frozen=True)
class Problem:
    """A line that cannot be taken: its row (from 1), why, and how it begins."""

    row: int
    reason: str
    excerpt: str

    def as_error(self, path: object, rows_before: int = 0) -> BadInputError:
        """The error that names file, row and reason."""
        return BadInputError(
            f"{path}:{rows_before + self.row}: {self.reason}",
            found=self.excerpt,
            fix="correct or remove this line",
        )


class RowError(Exception):
    """Raised by `parse_block`; carries a `Problem`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


def parse_block(data: bytes, keys: Sequence[str]) -> Iterator[Record]:
    """The records of a block of whole lines.

    Raises:
        RowError: at the first line that cannot be taken.
    """
    # On bytes, splitlines ends a line at LF, CR LF and CR only.
    for row, line in enumerate(data.splitlines(), start=1):
        try:
            yield Record(row, _texts(line, keys))
        except _Refused as refusal:
            excerpt = line[: 4 * _EXCERPT_CHARACTERS].decode(errors="backslashreplace")
            raise RowError(Problem(row, str(refusal), repr(excerpt[:_EXCERPT_CHARACTERS]))) from refusal


def read_records(file: SourceFile, keys: Sequence[str]) -> Iterator[Record]:
    """All records of one file, one after another.

    Raises:
        BadInputError: a line that cannot be taken, with its file and row.
        UsageError: the file cannot be read, or was changed meanwhile.
    """
    rows = 0
    for unit in plan_units([file], _READ_BYTES):
        for block in blocks(unit, _READ_BYTES):
            row = 0
            try:
                for record in parse_block(block.data, keys):
                    row = record.row
                    yield Record(rows + row, record.texts)
            except RowError as error:
                raise error.problem.as_error(file.path, rows) from error
            rows += row
    check_unchanged(file)


class _Refused(Exception):
    """Why a line cannot be taken."""


def _texts(line: bytes, keys: Sequence[str]) -> tuple[list[str], ...]:
    value = _json(line)
    if not isinstance(value, dict):
        raise _Refused(f"not a JSON object but {_kind(value)}")
    return tuple(_sentences(value, key) for key in keys)


def _json(line: bytes) -> Any:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise _Refused(f"not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1}") from error
    if not text.strip():
        raise _Refused("blank line")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise _Refused(f"not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise _Refused(f"JSON that cannot be read: {error}") from error


def _sentences(value: dict[str, Any], key: str) -> list[str]:
    if key not in value:
        present = ", ".join(map(repr, list(value)[:5])) or "none"
        raise _Refused(f"no key {key!r} (keys: {present})")
    content = value[key]
    sentences = content if isinstance(content, list) else [content]
    for sentence in sentences:
        if not isinstance(sentence, str):
            inside = " a list with" if isinstance(content, list) else ""
            raise _Refused(f"key {key!r} holds{inside} {_kind(sentence)}, not a string or a list of strings")
        if not _is_unicode(sentence):
            raise _Refused(f"key {key!r} holds a lone surrogate, which is not text")
    return sentences


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: object) -> str:
    if value is None:
        return "null"
    kinds = {bool: "a boolean", dict: "an object", list: "a list", str: "a string"}
    return kinds.get(type(value), "a number")
