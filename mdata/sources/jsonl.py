"""Parses lines of JSON into text columns: Python's dialect of JSON, strict UTF-8, and a reason for every bad line.

The dialect is that of `json.loads` on text: NaN, Infinity, numbers of any size and repeated keys (the last counts) are
accepted; a byte order mark, raw control characters and blank lines are not. orjson, which is stricter and faster,
parses first; the standard library parses what it refuses. A key is looked up at the top level; one with dots that is
not found there is looked up level by level.

Slow twin: tests/reference/records.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, pairwise
from operator import itemgetter
from typing import Any

import orjson

from mdata.sources.chat_schema import flat_record
from mdata.sources.conversation import BadConversation
from mdata.sources.record_batch import (
    BadRecord,
    Column,
    ReadSpec,
    RecordBatch,
    column_of,
    decoded,
    list_refused,
    read_one_by_one,
    too_long,
)
from mdata.sources.record_texts import filled_text, is_kept, is_unicode

# orjson's own limit is 1,024 levels. The standard library's depends on the caller's stack, so this lower one applies.
DEEPEST_OUTSIDE_ORJSON = 500
_LONGEST_INTEGER = 20  # digits of 64 bits, and a sign
# An unterminated string matches to the end, so that no character is scanned twice.
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
_Values = tuple[Any, ...]


def parse_lines(data: bytes, spec: ReadSpec) -> RecordBatch:
    """The records of whole lines, and the bad rows."""
    lines = split_lines(data)
    if columns := _all_good(lines, spec):
        return RecordBatch(len(lines), None, columns, [])
    return read_one_by_one(
        lines, lambda line: _record(line, spec), spec, columns=lambda values: columns_of(values, spec), line_of=bytes
    )


def split_lines(data: bytes) -> list[bytes]:
    """The rows of lines of JSON, without their ends. Lines end at LF, CR LF or CR; the last one may lack its end."""
    if b"\r" in data:
        # On bytes, splitlines uses exactly these three ends.
        return data.splitlines()
    lines = data.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def _all_good(lines: Sequence[bytes], spec: ReadSpec) -> tuple[Column, ...] | None:
    """The columns, without Python code for each line; None if any line may be bad."""
    if not lines or spec.template or spec.where or spec.tokens or max(map(len, lines)) > spec.max_record_bytes:
        return None
    if spec.chat is not None:
        return _all_good_chats(lines, spec)
    take = _taker(spec.json_keys)
    try:
        values = list(map(take, map(orjson.loads, lines)))
    except (ValueError, LookupError, TypeError):
        return None
    # orjson returns no lone surrogates, so only types remain to be checked.
    by_key = [values] if len(spec.json_keys) == 1 else [list(column) for column in zip(*values, strict=True)]
    columns = [column_of(column, spec) for column in by_key]
    good = tuple(column for column in columns if column is not None)
    return good if len(good) == len(columns) else None


def _all_good_chats(lines: Sequence[bytes], spec: ReadSpec) -> tuple[Column, ...] | None:
    """The same for conversations."""
    try:
        records = list(map(orjson.loads, lines))
        values = [tuple(_conversation(record, key, spec) for key in spec.json_keys) for record in records]
    except (ValueError, LookupError, TypeError, BadConversation):
        return None
    return columns_of(values, spec)


def _conversation(record: dict[str, Any], key: str, spec: ReadSpec) -> list[str]:
    """The messages of a key; the record's fields are those of every object on the path to it.

    Raises:
        LookupError: no such key.
        BadConversation: no usable conversation.
    """
    assert spec.chat is not None, "called for conversations only"
    value = _look_up(record, key)
    beside = {name: field for name, field in record.items() if name not in spec.json_keys}
    if key not in record:
        levels = key.split(".")
        beside.pop(levels[0])
        for level, inner in pairwise(levels):
            record = record[level]
            beside |= {name: field for name, field in record.items() if name != inner}
    return flat_record(value, beside, schema=spec.chat_schema, train_on=spec.chat, template=spec.chat_template)


def _taker(keys: Sequence[str]) -> Callable[[Any], Any]:
    """A function from an object to the value of the key, or the values of several; it raises KeyError or TypeError."""
    if not any("." in key for key in keys):
        return itemgetter(*keys)
    if len(keys) == 1:
        return lambda value: _look_up(value, keys[0])
    return lambda value: tuple(_look_up(value, key) for key in keys)


def _look_up(value: Any, key: str) -> Any:
    """The value of a key at the top level, or of a dotted key below it.

    Raises:
        LookupError: no such key, or something on the way to it is not an object.
    """
    if key in value or "." not in key:
        return value[key]
    for level in key.split("."):
        if not isinstance(value, dict):
            raise KeyError(key)
        value = value[level]
    return value


def columns_of(values: Sequence[_Values], spec: ReadSpec) -> tuple[Column, ...]:
    """Columns of records whose values were checked."""
    columns = []
    for number in range(len(spec.json_keys)):
        column = column_of([value[number] for value in values], spec)
        assert column is not None, "values are strings or lists of strings here"
        columns.append(column)
    return tuple(columns)


def _record(line: bytes, spec: ReadSpec) -> _Values | None:
    """The values of a line; None: it is filtered out."""
    if len(line) > spec.max_record_bytes:
        raise too_long(spec)
    try:
        value = orjson.loads(line)
    except ValueError:
        value = _python_json(line)
    if not isinstance(value, dict):
        raise BadRecord("not-object", f"not a JSON object but {_kind_of(value)}")
    look_up = partial(_look_up, value)
    if not is_kept(look_up, spec):
        return None
    if spec.template is not None:
        return (filled_text(spec.template, look_up),)
    return tuple(_content(value, key, spec) for key in spec.json_keys)


def _python_json(line: bytes) -> Any:
    """A line by `json.loads`, with integers of any size: above 64 bits as floats, as orjson gives them.

    Raises:
        BadRecord: not JSON, or nested too deeply.
    """
    text = decoded(line)
    if not text.strip():
        raise BadRecord("blank", "blank line")
    try:
        if _is_deep(text):
            raise RecursionError
        return json.loads(text, parse_int=_integer)
    except json.JSONDecodeError as error:
        hint = " (a record must be on one line)" if text.strip() in ("[", "{", "]", "}") else ""
        what = error.msg.removesuffix(" at")  # two of the library's messages end with it
        raise BadRecord("not-json", f"not JSON: {what} at column {error.colno}{hint}") from error
    except RecursionError as error:
        raise BadRecord("too-deep", f"JSON nested deeper than {DEEPEST_OUTSIDE_ORJSON} levels") from error


def _integer(digits: str) -> int | float:
    value = int(digits) if len(digits) <= _LONGEST_INTEGER else float(digits)
    return value if -(1 << 63) <= value < 1 << 64 else float(value)


def _is_deep(text: str) -> bool:
    """Whether brackets outside strings are nested too deeply (of text that is not JSON: whether they may be)."""
    if text.count("[") + text.count("{") <= DEEPEST_OUTSIDE_ORJSON:
        return False
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        first = match[0][0]
        depth += (first in "[{") - (first in "]}")
        if depth > DEEPEST_OUTSIDE_ORJSON:
            return True
    return False


def _content(value: dict[str, Any], key: str, spec: ReadSpec) -> str | list[str]:
    try:
        content = _look_up(value, key) if spec.chat is None else _conversation(value, key, spec)
    except LookupError as error:
        present = ", ".join(repr(name[:40]) for name in islice(value, 5)) or "none"
        raise BadRecord("no-key", f"no key {key!r} (keys: {present})") from error
    except BadConversation as error:
        raise BadRecord("bad-chat", f"key {key!r}: {error}") from error
    if spec.tokens:
        return _ids(content, key)
    if isinstance(content, list) and not spec.sentence_lists:
        raise list_refused(key)
    for sentence in content if isinstance(content, list) else [content]:
        if not isinstance(sentence, str):
            inside = " a list with" if isinstance(content, list) else ""
            problem = f"key {key!r} holds{inside} {_kind_of(sentence)}, not a string or a list of strings"
            raise BadRecord("bad-value", problem)
        if not is_unicode(sentence):
            raise BadRecord("surrogate", f"key {key!r} holds a lone surrogate, which is not text")
    return content


def _ids(content: Any, key: str) -> str:
    """Token ids as text, with blanks between them."""
    if not isinstance(content, list):
        raise BadRecord("bad-value", f"key {key!r} holds {_kind_of(content)}, not a list of token ids")
    for id in content:
        if type(id) is not int or not 0 <= id < 1 << 31:
            raise BadRecord("bad-value", f"key {key!r} holds {json.dumps(id, default=str)[:40]}, not a token id")
    return " ".join(map(str, content))


def _kind_of(value: object) -> str:
    """A JSON value's type in words."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", dict: "an object", list: "a list", str: "a string"}
    return kinds.get(type(value), "a number")
