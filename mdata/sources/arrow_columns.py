"""Text columns of Arrow data: which columns, rows in chunks of about the same number of bytes, and chunks to records.

Shared by parquet and Arrow files. Columns of text are strings, bytes that hold UTF-8, or lists of these; a dotted name
that is not a column is looked up in structs. A chunk ends with the row that fills it, by a sum that does not depend on
how the file is divided or how much is decoded at once. Text is decoded in batches of bounded size, even if a dictionary
expands greatly.

A chunk is passed on as an Arrow stream of one batch: the columns of text as bytes or lists of bytes, then the columns
that only the filter needs. `parse_rows` turns it into text columns and bad rows: there UTF-8 is checked, and nulls and
long rows become bad rows.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from mdata.errors import BadInputError, MdataError, UsageError, counted, explain_os_error
from mdata.sources.input_files import SourceFile
from mdata.sources.jsonl import columns_of, parse_lines
from mdata.sources.record_batch import (
    BadRecord,
    ChunkContent,
    Column,
    ReadSpec,
    RecordBatch,
    decoded,
    list_refused,
    read_one_by_one,
    too_long,
)
from mdata.sources.record_texts import filled_text, is_kept
from mdata.sources.row_filter import Kind
from mdata.util.arrays import ranges, running_sums
from mdata.util.stop_signals import raise_pending_stop

# Text that is decoded at once, besides parts that the format forces a reader to load whole.
DECODED_BYTES = 32 << 20
_ITEMS = 1 << 20  # of list views, whose items are found by copying them
# Added to the size of each row, so that rows without text fill a chunk too.
_ROW_BYTES = 8
_TEXT_TYPES = (
    pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view(),
)  # fmt: skip
_AS_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
_VALUE_BYTES = 64  # of a number, or around a text, as a Python object
# What pyarrow raises on damaged data; for example UnicodeDecodeError for a column's name.
_ARROW_ERRORS = (
    pa.ArrowException, OSError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, MemoryError,
    struct.error,
)  # fmt: skip


@dataclass(frozen=True)
class ColumnPath:
    """The position of a column in a file.

    Attributes:
        path: the names from the top level; empty: the file does not have the column, and all its values are null.
        kind: "text", or the type that a filter compares it with; None: only tested for null.
    """

    path: tuple[str, ...]
    kind: Kind | None

    @property
    def name(self) -> str:
        """The path as text."""
        return ".".join(self.path)


def row_chunks(
    batches: Iterator[pa.RecordBatch], chunk_bytes: int, *, spec: ReadSpec, reached: Callable[[int], int]
) -> Iterator[ChunkContent]:
    """Rows as chunks.

    Args:
        batches: from `text_batches`, for all rows of a file.
        chunk_bytes: about how much text a chunk holds.
        spec: how records are read.
        reached: maps a number of rows to their bytes in the file.
    """
    rows = reported = 0
    for batch in _regroup(batches, chunk_bytes):
        start, rows = rows, rows + len(batch)
        file_bytes = reached(rows)
        yield ChunkContent(start, rows, _to_bytes(_truncate(batch, spec)), file_bytes - reported)
        reported = file_bytes


@contextmanager
def damage_named(file: SourceFile, kind: str, *, rows: Callable[[], int]) -> Iterator[None]:
    """Turn the library's errors about a file into ours.

    Args:
        file: being read.
        kind: the format, in a word.
        rows: number of rows read before.
    """
    try:
        yield
    except MdataError:
        raise
    except _ARROW_ERRORS as error:
        raise_pending_stop()
        if isinstance(error, OSError) and error.errno is not None:
            raise explain_os_error(error, "reading the input") from error
        memory = ", or needs more memory than there is" if isinstance(error, MemoryError) else ""
        raise BadInputError(
            f"{file.path}: the {kind} data is damaged after {counted(rows(), 'row')}{memory}",
            found=_one_line(str(error) or type(error).__name__),
            fix="download or write the file again",
        ) from error


def places_of(schema: pa.Schema, spec: ReadSpec, *, file: SourceFile) -> list[ColumnPath]:
    """The positions of the columns that become text, followed by those that only the filter needs.

    Raises:
        UsageError: a column is missing, or has another type.
    """
    compared = dict(spec.where.columns) if spec.where else {}
    if spec.tokens:
        path_of = {name: _find(schema, name, file=file) for name in dict.fromkeys((*spec.json_keys, *compared))}
        for name in spec.json_keys:
            path = path_of[name]
            item = item_type(path[1]) if path else None
            if not (item and pa.types.is_integer(item)):
                raise UsageError(f"{file.path}: column {name!r} holds {path and path[1]}", expected="lists of integers")
        return [ColumnPath(path[0], None) for path in path_of.values() if path]
    if spec.chat is not None:
        for name in (*spec.json_keys, *compared):
            column = _find(schema, name, file=file)
            item = item_type(column[1]) if column else None
            is_text = column is not None and _plain_type(column[1]) in _TEXT_TYPES
            is_messages = item is not None and pa.types.is_struct(item)
            by_text = spec.chat_schema != "messages" and is_text
            if name in spec.json_keys and not by_text and (not is_messages or spec.chat_schema in ("alpaca", "dolly")):
                of_schema = {"messages": "lists of structs (role and content)", "pairs": "these, or strings"}
                expected = f"{of_schema.get(spec.chat_schema, 'strings')}, for conversations"
                raise UsageError(f"{file.path}: column {name!r} holds {column and column[1]}", expected=expected)
        return [ColumnPath((name,), None) for name in schema.names]  # any column may be a field that matters
    places = []
    for name, optional in spec.text_columns.items():
        paths = _find(schema, name, file=file, optional=optional)
        if paths is not None and _plain_type(_text_item(paths[1], spec)) not in _TEXT_TYPES:
            lists = "" if spec.template else " or lists of strings"
            raise UsageError(f"{file.path}: column {name!r} holds {paths[1]}", expected=f"strings{lists}")
        if compared.pop(name, None) not in (None, "text"):
            raise UsageError(
                f"{file.path}: column {name!r} is text", fix=f"compare it with text in quotes: {name} = '1'"
            )
        places.append(ColumnPath(paths[0] if paths else (), "text"))
    for name, kind in compared.items():
        paths = _find(schema, name, file=file)
        assert paths is not None, "it is not optional"
        if kind is not None and not _is_of_kind(_plain_type(paths[1]), kind):
            raise UsageError(f"{file.path}: column {name!r} holds {paths[1]}, and --where compares it with {kind}")
        places.append(ColumnPath(paths[0], kind))
    if not any(place.path for place in places):
        raise UsageError(f"{file.path} has none of the columns {', '.join(spec.text_columns)}", found=_named(schema))
    return places


def _find(
    schema: pa.Schema, key: str, *, file: SourceFile, optional: bool = False
) -> tuple[tuple[str, ...], pa.DataType] | None:
    """The names from the top to a column, and its type."""
    path = (key,) if key in schema.names else tuple(key.split("."))
    fields = [schema.field(number) for number, name in enumerate(schema.names) if name == path[0]]
    for name in path[1:]:
        inside = [f.type for f in fields if pa.types.is_struct(f.type)]
        fields = [kind.field(number) for kind in inside for number in range(kind.num_fields)]
        fields = [field for field in fields if field.name == name]
    if not fields and optional:
        return None
    if len(fields) != 1:
        problem = f"{file.path}: {'no' if not fields else 'more than one'} column {key!r}"
        raise UsageError(problem, found=_named(schema), fix="name another column")
    return path, fields[0].type


def _named(schema: pa.Schema) -> str:
    return f"columns {', '.join(schema.names[:10])}"


def _text_item(kind: pa.DataType, spec: ReadSpec) -> pa.DataType:
    return (None if spec.template else item_type(kind)) or kind


def _is_of_kind(plain: pa.DataType, kind: Kind) -> bool:
    if kind == "text":
        return plain in _TEXT_TYPES
    return pa.types.is_boolean(plain) if kind == "a boolean" else _is_number(plain)


def _is_number(plain: pa.DataType) -> bool:
    return bool(pa.types.is_integer(plain) or pa.types.is_floating(plain))


def item_type(kind: pa.DataType) -> pa.DataType | None:
    """The item type of a list type; None: not a list type."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return kind.value_type if is_list or _is_list_view(kind) else None


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def text_batches(
    arrays: Sequence[pa.Array], places: Sequence[ColumnPath], *, spec: ReadSpec
) -> Iterator[pa.RecordBatch]:
    """Columns of the same rows, text as bytes or lists of bytes, in batches that stay small when decoded.

    Rows that are too long keep only enough sentences to show it. Conversations become lines of JSON.
    """
    if spec.as_lines:
        yield from _row_lines(arrays, places, spec=spec)
        return
    # Views of many rows may share items, so their total size is bounded before they are copied.
    items = sum(
        (lengths_of(array) for array in arrays if _is_list_view(array.type)), np.zeros(len(arrays[0]), np.int64)
    )
    for few in _divided(arrays, items, _ITEMS):
        lists = [_without_long_lists(_without_views(array), spec) for array in few]
        sizes = sum(map(bytes_of, lists), np.zeros(len(lists[0]), np.int64))
        for columns in _divided(lists, sizes, DECODED_BYTES):
            decoded = [_decoded(array, place) for array, place in zip(columns, places, strict=True)]
            yield pa.RecordBatch.from_arrays(decoded, list(map(str, range(len(decoded)))))


def _row_lines(arrays: Sequence[pa.Array], places: Sequence[ColumnPath], *, spec: ReadSpec) -> Iterator[pa.RecordBatch]:
    """Whole rows as lines of JSON, for the parser of lines; a row that is too long is a line that is too long."""
    arrays = [array.view(with_bytes(array.type)) for array in arrays]
    names = [place.name for place in places]
    sizes = sum((_nested_bytes(array, each=_VALUE_BYTES) for array in arrays), np.zeros(len(arrays[0]), np.int64))
    for columns in _divided(arrays, sizes, DECODED_BYTES):
        # A row that is larger than a batch may be is alone in it.
        if (
            len(columns[0]) == 1
            and sum(int(_nested_bytes(array, each=0)[0]) for array in columns) > spec.max_record_bytes
        ):
            lines = [b"{" * (spec.max_record_bytes + 1)]
        else:
            values = (array.to_pylist() for array in columns)
            lines = [
                _as_json(dict(zip(names, map(_without_nulls, row), strict=True))) for row in zip(*values, strict=True)
            ]
        yield pa.RecordBatch.from_arrays([pa.array(lines, pa.large_binary())], ["0"])


def _without_nulls(value: Any) -> Any:
    """Without the fields of structs that are null: a struct has those of all rows, a message or a call only its own."""
    if isinstance(value, dict):
        return {name: _without_nulls(field) for name, field in value.items() if field is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _as_json(row: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(row, default=_as_text)
    except TypeError:  # lone surrogates: bytes that are not UTF-8
        return json.dumps(row, default=_as_text).encode()


def _as_text(value: Any) -> str:
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else str(value)


def _nested_bytes(array: pa.Array, *, each: int) -> npt.NDArray[np.int64]:
    """The bytes of text in each row of a column of any type, and `each` for every value."""
    if pa.types.is_struct(array.type):
        return sum((_nested_bytes(field, each=each) for field in array.flatten()), np.full(len(array), each))
    if item_type(array.type) is not None:
        items = running_sums(_nested_bytes(array.flatten(), each=each))
        return np.diff(items[running_sums(lengths_of(array))]) + each
    is_text = _plain_type(array.type) in _TEXT_TYPES
    return (sizes_of(array) if is_text else np.zeros(len(array), np.int64)) + each


def with_bytes(kind: pa.DataType) -> pa.DataType:
    """The type with bytes instead of strings; UTF-8 is checked row by row later."""
    if isinstance(kind, pa.BaseExtensionType):
        return with_bytes(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, with_bytes(kind.value_type), ordered=kind.ordered)
    if pa.types.is_struct(kind):
        return pa.struct(
            [kind.field(number).with_type(with_bytes(kind.field(number).type)) for number in range(kind.num_fields)]
        )
    if pa.types.is_map(kind):
        return pa.list_(with_bytes(pa.struct([kind.key_field, kind.item_field])))
    if item_type(kind) is None:
        return _AS_BYTES.get(kind, kind)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(with_bytes(kind.value_type), kind.list_size)
    makers = {
        pa.types.is_list: pa.list_,
        pa.types.is_large_list: pa.large_list,
        pa.types.is_list_view: pa.list_view,
        pa.types.is_large_list_view: pa.large_list_view,
    }
    maker = next(maker for is_kind, maker in makers.items() if is_kind(kind))
    return maker(with_bytes(kind.value_type))


def at(batch: pa.RecordBatch, path: Sequence[str]) -> pa.Array:
    """A column of a batch."""
    if not path:
        return pa.nulls(len(batch), pa.large_binary())
    array = batch.column(path[0])
    return pc.struct_field(array, list(path[1:])) if len(path) > 1 else array


def _decoded(array: pa.Array, place: ColumnPath) -> pa.Array:
    """Text as bytes, numbers with 64 bits; a column only tested for null becomes `true` where it is not null."""
    if place.kind is None:
        return pc.if_else(array.is_null(), pa.scalar(None, pa.bool_()), pa.scalar(True))
    plain = _plain_type(array.type)
    if place.kind == "text":
        if item_type(array.type) is None:
            return array.cast(pa.large_binary())
        # Casting the list itself would also decode items outside a slice.
        ends = pa.array(running_sums(lengths_of(array)))
        return pa.LargeListArray.from_arrays(ends, array.flatten().cast(pa.large_binary()), mask=array.is_null())
    if pa.types.is_integer(plain):
        return array.cast(pa.uint64() if pa.types.is_unsigned_integer(plain) else pa.int64())
    return array.cast(pa.float64() if pa.types.is_floating(plain) else pa.bool_())


def _divided(arrays: Sequence[pa.Array], sizes: npt.NDArray[np.int64], most: int) -> Iterator[list[pa.Array]]:
    """The rows of arrays in batches of at most this size; a row is never divided."""
    ends = np.cumsum(sizes)
    first = before = 0
    while first < len(ends):
        stop = max(first + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield [array.slice(first, stop - first) for array in arrays]
        first, before = stop, int(ends[stop - 1])


def _without_views(array: pa.Array) -> pa.Array:
    """List views as lists; the library's own cast gives wrong offsets for empty lists and slices.

    Dictionaries of text views (Polars' categories) as dictionaries of text: the library cannot decode them.
    """
    if pa.types.is_dictionary(array.type) and "view" in str(array.type.value_type):
        return pa.DictionaryArray.from_arrays(array.indices, array.dictionary.cast(pa.large_binary()))
    if not _is_list_view(array.type):
        return array
    ends = pa.array(running_sums(lengths_of(array)))
    return pa.LargeListArray.from_arrays(ends, array.flatten(), mask=array.is_null())


def _without_long_lists(array: pa.Array, spec: ReadSpec) -> pa.Array:
    """Lists that are too long keep only enough sentences to show it."""
    if item_type(array.type) is None or bytes_of(array).max(initial=0) <= spec.max_record_bytes:
        return array
    sentences, ends = running_sums(sizes_of(array.flatten())), running_sums(lengths_of(array))
    # In each row, up to and including the first sentence that makes it too long.
    too_long_at = np.searchsorted(sentences, sentences[ends[:-1]] + spec.max_record_bytes, side="right")
    stops = np.minimum(ends[1:], too_long_at)
    counts = stops - ends[:-1]
    items = array.flatten()
    if "view" in str(items.type):  # the library does not accept views
        items = pa.concat_arrays([items.slice(*span) for span in zip(ends[:-1].tolist(), counts.tolist(), strict=True)])
    else:
        items = items.take(pa.array(ranges(ends[:-1], counts)))
    return pa.LargeListArray.from_arrays(pa.array(running_sums(counts)), items, mask=array.is_null())


def _regroup(batches: Iterator[pa.RecordBatch], chunk_bytes: int) -> Iterator[pa.RecordBatch]:
    """Batches that each end with the row that fills a chunk."""
    held: list[pa.RecordBatch] = []
    filled = 0
    for batch in batches:
        ends = np.cumsum(sum((bytes_of(column) for column in batch.columns), np.int64(_ROW_BYTES)))
        begin = base = 0
        while (last := int(np.searchsorted(ends, base + chunk_bytes - filled))) < len(batch):
            yield _joined([*held, batch.slice(begin, last + 1 - begin)])
            begin, base = last + 1, int(ends[last])
            held, filled = [], 0
        if begin < len(batch):
            held.append(batch.slice(begin))
            filled += int(ends[-1]) - base
    if held:
        yield _joined(held)


def bytes_of(array: pa.Array) -> npt.NDArray[np.int64]:
    """The bytes of text in each row, decoded or not; 0 for numbers."""
    kind = item_type(array.type)
    if _plain_type(kind or array.type) not in _TEXT_TYPES:
        return np.zeros(len(array), np.int64)
    if kind is None:
        return sizes_of(array)
    sentences, ends = running_sums(sizes_of(array.flatten())), running_sums(lengths_of(array))
    return np.diff(sentences[ends])


def sizes_of(array: pa.Array) -> npt.NDArray[np.int64]:
    """The bytes of each text."""
    if not pa.types.is_dictionary(array.type):
        return _sizes_of_views(array) if "view" in str(array.type) else _as_int64(pc.binary_length(array))
    of_entry = pa.array(sizes_of(array.dictionary))
    return _as_int64(of_entry.take(array.indices))


def _sizes_of_views(array: pa.Array) -> npt.NDArray[np.int64]:
    """The size of each text in an array of views, without copying the texts, which may overlap."""
    if not len(array):
        return np.zeros(0, np.int64)
    # 16 bytes per view; the first four are its length.
    numbers = np.frombuffer(array.buffers()[1], np.int32)[::4][array.offset : array.offset + len(array)]
    sizes = numbers.astype(np.int64)
    if array.null_count:
        sizes[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return sizes


def _is_list_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def lengths_of(array: pa.Array) -> npt.NDArray[np.int64]:
    """The number of items of each list."""
    return _as_int64(array.value_lengths())


def _as_int64(array: pa.Array) -> npt.NDArray[np.int64]:
    """Counts as int64; 0 for a null."""
    counts: npt.NDArray[np.int64] = pc.fill_null(array, 0).cast(pa.int64()).to_numpy(zero_copy_only=False)
    return counts


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _truncate(batch: pa.RecordBatch, spec: ReadSpec) -> pa.RecordBatch:
    """Values that are too long keep only enough bytes to show it."""
    arrays = [
        pc.binary_slice(column, 0, spec.max_record_bytes + 1)
        if column.type == pa.large_binary() and bytes_of(column).max(initial=0) > spec.max_record_bytes
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(arrays, batch.schema.names)


def _to_bytes(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _one_line(message: str) -> str:
    """The start of a library's message, which may quote arbitrary bytes."""
    return "".join(c if c.isprintable() else " " for c in message.splitlines()[0][:200])


def parse_rows(data: bytes, spec: ReadSpec) -> RecordBatch:
    """The records of a chunk of parquet or Arrow, and the bad rows."""
    batch = pa.ipc.open_stream(data).read_next_batch()
    if spec.as_lines:
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

    def line_of(contents: Mapping[str, Any]) -> bytes:
        return _as_line({name: contents[name] for name in spec.text_columns})

    return read_one_by_one(
        (dict(zip(names, (column[row].as_py() for column in batch.columns), strict=True)) for row in range(len(batch))),
        lambda contents: _record(contents, spec),
        spec,
        columns=lambda values: columns_of(values, spec),
        line_of=line_of,
    )


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
            raise BadRecord("bad-value", f"key {key!r} holds{inside} null, not a string or a list of strings")
        texts.append(decoded(sentence))
    return texts if isinstance(content, list) else texts[0]


def _as_line(contents: Mapping[str, Any]) -> bytes:
    """A row as a readable line of JSON; bytes that are not UTF-8 are escaped."""

    def shown(content: Any) -> Any:
        if isinstance(content, Sequence) and not isinstance(content, bytes):
            return [shown(sentence) for sentence in content]
        return None if content is None else content.decode(errors="backslashreplace")

    return orjson.dumps({name: shown(content) for name, content in contents.items()})
