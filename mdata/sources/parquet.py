"""Parquet: one column for each key, rows in file order, divided into chunks of about the same number of bytes.

Columns are strings, bytes that hold UTF-8, or lists of these; a dotted name that is not a column is looked up in
structs. A chunk ends with the first row that fills it, by a sum that does not depend on row groups or on how much is
decoded at once; it is passed on as an Arrow stream. Rows are decoded in batches of bounded size, however much text a
dictionary expands to; the library reads at least a page of each column at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mdata.errors import BadInputError, MdataError, UsageError, explain_os_error
from mdata.sources.input_files import SourceFile
from mdata.sources.jsonl import columns_of
from mdata.sources.record_batch import (
    BadRow,
    ChunkContent,
    Column,
    ReadSpec,
    RecordBatch,
    Refused,
    decoded,
    list_refused,
    too_long,
)
from mdata.util.arrays import ranges, running_sums
from mdata.util.stop_signals import raise_pending_stop

_MOST_ROWS = 1 << 15
# Text that is decoded at once, besides a page of each column.
_DECODED_BYTES = 32 << 20
_BUFFER_BYTES = 1 << 20
# A row counts this much besides its text, so that rows without text fill a chunk as well.
_ROW_BYTES = 8
_TEXT_TYPES = (
    pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view(),
)  # fmt: skip

# What pyarrow raises on damaged data; for example UnicodeDecodeError for a column's name.
_ARROW_ERRORS = (
    pa.ArrowException, OSError, ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, MemoryError,
)  # fmt: skip


def parquet_chunks(file: SourceFile, chunk_bytes: int, *, spec: ReadSpec) -> Iterator[ChunkContent]:
    """The chunks of a parquet file.

    Raises:
        BadInputError: the file is damaged.
        UsageError: it cannot be read, or has no text column of a key's name.
    """
    rows = 0
    try:
        with _reader(file) as opened:
            total, reported = max(sum(opened.metadata.row_group(g).num_rows for g in _groups(file, opened)), 1), 0
            for batch in _regroup(_batches(file, opened, spec, chunk_bytes=chunk_bytes), chunk_bytes):
                start, rows = rows, rows + len(batch)
                reached = file.disk_bytes * rows // total
                yield ChunkContent(start, rows, _to_bytes(_truncate(batch, spec)), reached - reported)
                reported = reached
    except MdataError:
        raise
    except _ARROW_ERRORS as error:
        raise_pending_stop()
        if isinstance(error, OSError) and error.errno is not None:
            raise explain_os_error(error, "reading the input") from error
        memory = ", or needs more memory than there is" if isinstance(error, MemoryError) else ""
        raise BadInputError(
            f"{file.path}: the parquet data is damaged after {rows} rows{memory}",
            found=_one_line(str(error) or type(error).__name__),
            fix="download or write the file again",
        ) from error


def _one_line(message: str) -> str:
    """The start of a message of the library, which may quote any bytes."""
    return "".join(c if c.isprintable() else " " for c in message.splitlines()[0][:200])


def _path_of(schema: pa.Schema, key: str, file: SourceFile) -> list[str]:
    """The names from the top to the column of a key."""
    path = [key] if key in schema.names else key.split(".")
    fields = [schema.field(name) for name in schema.names if name == path[0]]
    for name in path[1:]:
        inside = [f.type for f in fields if pa.types.is_struct(f.type)]
        fields = [kind.field(number) for kind in inside for number in range(kind.num_fields)]
        fields = [field for field in fields if field.name == name]
    if len(fields) != 1:
        what = f"{file.path}: {'no' if not fields else 'more than one'} column {key!r}"
        raise UsageError(what, found=f"columns {', '.join(schema.names[:10])}", fix="name a column with json_keys")
    kind = fields[0].type
    if _plain_type(_item_type(kind) or kind) not in _TEXT_TYPES:
        raise UsageError(f"{file.path}: column {key!r} holds {kind}", expected="strings or lists of strings")
    return path


def _item_type(kind: pa.DataType) -> pa.DataType | None:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    return kind.value_type if is_list or pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind) else None


def _plain_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _batches(file: SourceFile, opened: pq.ParquetFile, spec: ReadSpec, *, chunk_bytes: int) -> Iterator[pa.RecordBatch]:
    """All rows with one column for each key, as bytes or lists of bytes, a few chunks' worth at once.

    A dictionary can expand to any multiple of its size in the file, so the number of rows that are decoded at once is
    small enough for each of them to be the largest entry. A row may hold any number of sentences: columns of lists
    stay encoded until their rows are divided by their decoded sizes.
    """
    paths = [_path_of(opened.schema_arrow, key, file) for key in spec.json_keys]
    names = [".".join(path) for path in paths]
    leaves = [path for path in _leaves(opened) if any(path == name or path.startswith(f"{name}.") for name in names)]
    has_lists = any(_item_type(_at(opened.schema_arrow.empty_table(), path).type) for path in paths)
    with _reader(file, read_dictionary=leaves) as encoded:
        for number in _groups(file, opened):
            group = opened.metadata.row_group(number)
            row_bytes = max(1, group.total_byte_size // max(group.num_rows, 1))
            most = min(max(chunk_bytes // row_bytes, 1), _MOST_ROWS)
            by_dictionary = any(group.column(i).has_dictionary_page for i in range(group.num_columns))
            if by_dictionary:
                most = min(most, max(1, _DECODED_BYTES // _largest_entry(encoded, number, names, paths)))
            reader = encoded if by_dictionary and has_lists else opened
            for batch in reader.iter_batches(most, row_groups=[number], columns=names, use_threads=False):
                arrays = [_at(batch, path) for path in paths]
                for columns in _small_batches([_without_long_lists(array, spec) for array in arrays]):
                    yield pa.RecordBatch.from_arrays(list(map(_as_bytes, columns)), list(map(str, range(len(columns)))))


def _groups(file: SourceFile, opened: pq.ParquetFile) -> range:
    return range(*file.section[:2]) if file.section else range(opened.metadata.num_row_groups)


@contextmanager
def _reader(file: SourceFile, **options: Any) -> Iterator[pq.ParquetFile]:
    """The file, open. What was read of it is right, whatever the system says when it is closed."""
    opened = pq.ParquetFile(file.path, pre_buffer=False, buffer_size=_BUFFER_BYTES, **options)
    try:
        yield opened
    finally:
        with suppress(OSError):
            opened.close()


def _leaves(opened: pq.ParquetFile) -> list[str]:
    return [opened.schema.column(number).path for number in range(len(opened.schema))]


def _largest_entry(encoded: pq.ParquetFile, group: int, names: list[str], paths: Sequence[Sequence[str]]) -> int:
    """Bytes of the largest entry in the dictionaries of a row group, which come with its first row."""
    largest = 1
    for batch in encoded.iter_batches(1, row_groups=[group], columns=names, use_threads=False):
        for array in (_at(batch, path) for path in paths):
            values = array.flatten() if _item_type(array.type) else array
            if pa.types.is_dictionary(values.type):
                largest = max(largest, int(_sizes(values.dictionary).max(initial=0)))
        break
    return largest


def _small_batches(arrays: list[pa.Array]) -> Iterator[list[pa.Array]]:
    """The rows of a batch in batches that stay small when decoded; a row is never divided."""
    ends = np.cumsum(sum(map(_bytes_of, arrays), np.int64(0)))
    first = before = 0
    while first < len(ends):
        stop = max(first + 1, int(np.searchsorted(ends, before + _DECODED_BYTES, side="right")))
        yield [array.slice(first, stop - first) for array in arrays]
        first, before = stop, int(ends[stop - 1])


def _without_long_lists(array: pa.Array, spec: ReadSpec) -> pa.Array:
    """Lists that are too long keep only as many sentences as prove it."""
    if _item_type(array.type) is None or _bytes_of(array).max(initial=0) <= spec.max_record_bytes:
        return array
    sentences, ends = running_sums(_sizes(array.flatten())), running_sums(_lengths(array))
    # In each row up to and with the first sentence that makes it too long.
    kept = np.searchsorted(sentences, sentences[ends[:-1]] + spec.max_record_bytes, side="right")
    stops = np.minimum(ends[1:], kept)
    counts = stops - ends[:-1]
    items = array.flatten().take(pa.array(ranges(ends[:-1], counts)))
    return pa.LargeListArray.from_arrays(pa.array(running_sums(counts)), items, mask=array.is_null())


def _at(batch: pa.RecordBatch, path: Sequence[str]) -> pa.Array:
    array = batch.column(path[0])
    return pc.struct_field(array, list(path[1:])) if len(path) > 1 else array


def _as_bytes(array: pa.Array) -> pa.Array:
    is_list = _item_type(array.type) is not None
    return array.cast(pa.large_list(pa.large_binary()) if is_list else pa.large_binary())


def _regroup(batches: Iterator[pa.RecordBatch], chunk_bytes: int) -> Iterator[pa.RecordBatch]:
    """Batches of which each ends with the row that fills a chunk."""
    held: list[pa.RecordBatch] = []
    filled = 0
    for batch in batches:
        ends = np.cumsum(sum((_bytes_of(column) for column in batch.columns), np.int64(_ROW_BYTES)))
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


def _bytes_of(array: pa.Array) -> npt.NDArray[np.int64]:
    """The bytes of text in each row, decoded or not."""
    if _item_type(array.type) is None:
        return _sizes(array)
    sentences, ends = running_sums(_sizes(array.flatten())), running_sums(_lengths(array))
    return np.diff(sentences[ends])


def _sizes(array: pa.Array) -> npt.NDArray[np.int64]:
    """The bytes of each text."""
    if not pa.types.is_dictionary(array.type):
        plain = array.cast(pa.large_binary()) if "view" in str(array.type) else array
        return _as_int64(pc.binary_length(plain))
    of_entry = pa.array(_sizes(array.dictionary))
    return _as_int64(of_entry.take(array.indices))


def _lengths(array: pa.Array) -> npt.NDArray[np.int64]:
    return _as_int64(array.value_lengths())


def _as_int64(array: pa.Array) -> npt.NDArray[np.int64]:
    """Counts as numbers; that of a null is 0."""
    counts: npt.NDArray[np.int64] = pc.fill_null(array, 0).cast(pa.int64()).to_numpy(zero_copy_only=False)
    return counts


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _truncate(batch: pa.RecordBatch, spec: ReadSpec) -> pa.RecordBatch:
    """Values that are too long keep only as many bytes as prove it."""
    arrays = [
        pc.binary_slice(column, 0, spec.max_record_bytes + 1)
        if column.type == pa.large_binary() and _bytes_of(column).max(initial=0) > spec.max_record_bytes
        else column
        for column in batch.columns
    ]
    return pa.RecordBatch.from_arrays(arrays, batch.schema.names)


def _to_bytes(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def parse_rows(data: bytes, spec: ReadSpec) -> RecordBatch:
    """The records of a chunk of parquet, and the bad rows."""
    batch = pa.ipc.open_stream(data).read_next_batch()
    columns = [_all_good(column, spec) for column in batch.columns]
    good = tuple(column for column in columns if column is not None)
    return RecordBatch(len(batch), None, good, []) if len(good) == len(columns) else _row_by_row(batch, spec)


def _all_good(array: pa.Array, spec: ReadSpec) -> Column | None:
    """The column, or None if any row may be bad."""
    is_list = pa.types.is_large_list(array.type)
    values = array.flatten() if is_list else array
    if is_list and not spec.sentence_lists:
        return None
    if array.null_count or values.null_count or _bytes_of(array).max(initial=0) > spec.max_record_bytes:
        return None
    try:
        # This is where UTF-8 is checked.
        sentences = values.cast(pa.large_string()).to_pylist()
    except pa.ArrowInvalid:
        return None
    return Column(sentences, np.cumsum(_lengths(array)).tolist() if is_list else None)


def _row_by_row(batch: pa.RecordBatch, spec: ReadSpec) -> RecordBatch:
    kept: list[int] = []
    values: list[tuple[Any, ...]] = []
    bad_rows: list[BadRow] = []
    for row in range(len(batch)):
        contents = [column[row].as_py() for column in batch.columns]
        try:
            pairs = zip(spec.json_keys, contents, strict=True)
            values.append(tuple(_content(key, content, spec) for key, content in pairs))
            kept.append(row + 1)
        except Refused as refusal:
            bad_rows.append(refusal.bad_row(row + 1, _as_line(spec.json_keys, contents), spec=spec))
    return RecordBatch(len(batch), kept if bad_rows else None, columns_of(values, spec), bad_rows)


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


def _as_line(keys: Sequence[str], contents: Sequence[Any]) -> bytes:
    """A row as a line of JSON for people to read; bytes that are not UTF-8 are shown as escapes."""

    def shown(content: Any) -> Any:
        if isinstance(content, list):
            return [shown(sentence) for sentence in content]
        return None if content is None else content.decode(errors="backslashreplace")

    return orjson.dumps(dict(zip(keys, map(shown, contents), strict=True)))
