"""Parses chunks of parquet and Arrow files into text columns and bad rows.

A chunk is an Arrow stream of one batch, as written by mdata/sources/arrow_columns.py: the columns of text as bytes or
lists of bytes, then the columns that only the filter needs; or one column of conversations, as lines of JSON. Here
UTF-8 is checked, and nulls and long rows become bad rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from mdata.sources.arrow_columns import bytes_of, lengths_of
from mdata.sources.jsonl import columns_of, parse_lines
from mdata.sources.record_batch import BadRow, Column, ReadSpec, RecordBatch, Refused, decoded, list_refused, too_long
from mdata.sources.record_texts import filled_text, is_kept


def parse_rows(data: bytes, spec: ReadSpec) -> RecordBatch:
    """The records of a chunk of parquet or Arrow, and the bad rows."""
    batch = pa.ipc.open_stream(data).read_next_batch()
    if spec.chat is not None:
        return parse_lines(b"\n".join(batch.column(0).to_pylist()), spec)
    if spec.template or spec.where:
        return _row_by_row(batch, spec)
    columns = [_all_good(column, spec) for column in batch.columns]
    good = tuple(column for column in columns if column is not None)
    return RecordBatch(len(batch), None, good, []) if len(good) == len(columns) else _row_by_row(batch, spec)


def _all_good(array: pa.Array, spec: ReadSpec) -> Column | None:
    """The column, or None if any row may be bad."""
    is_list = pa.types.is_large_list(array.type)
    values = array.flatten() if is_list else array
    if is_list and not spec.sentence_lists:
        return None
    if array.null_count or values.null_count or bytes_of(array).max(initial=0) > spec.max_record_bytes:
        return None
    try:
        # Checks UTF-8.
        sentences = values.cast(pa.large_string()).to_pylist()
    except pa.ArrowInvalid:
        return None
    return Column(sentences, np.cumsum(lengths_of(array)).tolist() if is_list else None)


def _row_by_row(batch: pa.RecordBatch, spec: ReadSpec) -> RecordBatch:
    names = list(dict.fromkeys((*spec.text_columns, *(name for name, _ in (spec.where.columns if spec.where else ())))))
    kept: list[int] = []
    values: list[tuple[Any, ...]] = []
    bad_rows: list[BadRow] = []
    for row in range(len(batch)):
        contents = dict(zip(names, (column[row].as_py() for column in batch.columns), strict=True))
        try:
            value = _record(contents, spec)
        except Refused as refusal:
            shown = {name: contents[name] for name in spec.text_columns}
            bad_rows.append(refusal.bad_row(row + 1, _as_line(shown), spec=spec))
            continue
        if value is not None:
            values.append(value)
            kept.append(row + 1)
    return RecordBatch(len(batch), kept if len(kept) < len(batch) else None, columns_of(values, spec), bad_rows)


def _record(contents: Mapping[str, Any], spec: ReadSpec) -> tuple[Any, ...] | None:
    """The values of a row; None: it is filtered out."""

    def look_up(name: str) -> Any:
        content = contents[name]
        if not isinstance(content, bytes):
            return content
        if len(content) > spec.max_record_bytes:
            raise too_long(spec)
        return decoded(content)

    if not is_kept(look_up, spec):
        return None
    if spec.template:
        return (filled_text(spec.template, look_up),)
    return tuple(_content(key, contents[key], spec) for key in spec.json_keys)


def _content(key: str, content: bytes | list[bytes | None] | None, spec: ReadSpec) -> str | list[str]:
    sentences = content if isinstance(content, list) else [content]
    texts = []
    if isinstance(content, list) and not spec.sentence_lists:
        raise list_refused(key)
    if sum(len(sentence or b"") for sentence in sentences) > spec.max_record_bytes:
        raise too_long(spec)
    for sentence in sentences:
        if sentence is None:
            inside = " a list with" if isinstance(content, list) else ""
            raise Refused("bad-value", f"key {key!r} holds{inside} null, not a string or a list of strings")
        texts.append(decoded(sentence))
    return texts if isinstance(content, list) else texts[0]


def _as_line(contents: Mapping[str, Any]) -> bytes:
    """A row as a readable line of JSON; bytes that are not UTF-8 are escaped."""

    def shown(content: Any) -> Any:
        if isinstance(content, Sequence) and not isinstance(content, bytes):
            return [shown(sentence) for sentence in content]
        return None if content is None else content.decode(errors="backslashreplace")

    return orjson.dumps({name: shown(content) for name, content in contents.items()})
