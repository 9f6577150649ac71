"""Parquet files: their text columns in row order, row group by row group.

Unusual: a dictionary can expand to any multiple of its size in the file, so a batch has so few rows that each could be
the largest entry. The library reads at least a page of each column at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3

from mdata.errors import BadInputError
from mdata.sources import arrow_columns
from mdata.sources.arrow_columns import (
    ColumnPath,
    at,
    damage_named,
    item_type,
    places_of,
    row_chunks,
    sizes_of,
    text_batches,
)
from mdata.sources.input_files import SourceFile
from mdata.sources.record_batch import ChunkContent, ReadSpec

_MOST_ROWS = 1 << 15
_BUFFER_BYTES = 1 << 20
_TAIL_BYTES = 8  # the footer's length and the magic number


def parquet_chunks(file: SourceFile, chunk_bytes: int, *, spec: ReadSpec) -> Iterator[ChunkContent]:
    """The chunks of a parquet file.

    Raises:
        BadInputError: the file is damaged.
        UsageError: it cannot be read, or a key's column is missing or has another type.
    """
    rows = 0
    with damage_named(file, "parquet", rows=lambda: rows), _reader(file) as opened:
        total = max(sum(opened.metadata.row_group(g).num_rows for g in _groups(file, opened)), 1)
        batches = _batches(file, opened, spec, chunk_bytes=chunk_bytes)
        for content in row_chunks(batches, chunk_bytes, spec=spec, reached=lambda n: file.disk_bytes * n // total):
            rows = content.stop
            yield content


def _batches(file: SourceFile, opened: pq.ParquetFile, spec: ReadSpec, *, chunk_bytes: int) -> Iterator[pa.RecordBatch]:
    """All rows, a few chunks' worth at once.

    A row may hold any number of sentences: columns of lists stay encoded until their rows are divided by their decoded
    sizes.
    """
    places = places_of(opened.schema_arrow, spec, file=file)
    names = [place.name for place in places if place.path]
    texts = [place.name for place in places if place.path and place.kind == "text"]
    leaves = [path for path in _leaves(opened) if _is_in(path, texts)]
    read = [number for number, path in enumerate(_leaves(opened)) if _is_in(path, names)]
    if spec.chat is not None:
        leaves = [column.path for column in map(opened.schema.column, range(len(opened.schema))) if _is_text(column)]
    empty = pa.RecordBatch.from_pylist([], opened.schema_arrow)
    has_lists = spec.chat is not None or any(item_type(at(empty, place.path).type) for place in places)
    with _reader(file, read_dictionary=leaves) as encoded:
        for number in _groups(file, opened):
            group = opened.metadata.row_group(number)
            row_bytes = max(1, group.total_byte_size // max(group.num_rows, 1))
            most = min(max(chunk_bytes // row_bytes, 1), _MOST_ROWS)
            # Before `column`, which ends the process if a column's metadata is damaged; this names the damage.
            largest = _largest_entry(encoded, number, names, places) if group.num_rows else 1
            by_dictionary = any(group.column(i).has_dictionary_page for i in read if group.num_rows)
            if by_dictionary and spec.chat is None:
                most = min(most, max(1, arrow_columns.DECODED_BYTES // largest))
            reader = encoded if by_dictionary and has_lists else opened
            for batch in reader.iter_batches(most, row_groups=[number], columns=names, use_threads=False):
                yield from text_batches([at(batch, place.path) for place in places], places, spec=spec)


def _groups(file: SourceFile, opened: pq.ParquetFile) -> range:
    return range(*file.section[:2]) if file.section else range(opened.metadata.num_row_groups)


@contextmanager
def _reader(file: SourceFile, *, read_dictionary: list[str] | None = None) -> Iterator[pq.ParquetFile]:
    """The open file. An error at closing does not matter: the data that was read is right."""
    source = parquet_source(file)
    opened = pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER_BYTES, read_dictionary=read_dictionary)
    try:
        yield opened
    finally:
        with suppress(OSError):
            opened.close()


def parquet_source(file: SourceFile) -> Any:
    """The source for pyarrow: a path, or an object as a file."""
    facts = file.as_object
    if facts is None:
        return file.path
    from mdata.object_storage.reading import ObjectFile

    return ObjectFile(facts)


def footer_of(file: SourceFile) -> tuple[str, list[int]]:
    """The hash of a file's footer, which says where each column of each row group lies, and the rows of its groups.

    Raises:
        BadInputError: the file is damaged.
    """
    with damage_named(file, "parquet", rows=lambda: 0):
        metadata = pq.read_metadata(parquet_source(file))
        source = parquet_source(file)
        with open(source, "rb") if isinstance(source, Path) else source as opened:  # noqa: PTH123
            opened.seek(-_TAIL_BYTES, os.SEEK_END)
            size = int.from_bytes(opened.read(4), "little")
            opened.seek(-_TAIL_BYTES - size, os.SEEK_END)
            digest = blake3(opened.read(size)).hexdigest()
    return digest, [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]


def group_starts(file: SourceFile) -> list[int]:
    """The byte at which each row group begins, if the file's bytes are divided in proportion to their sizes.

    Raises:
        BadInputError: the footer cannot be read.
    """
    try:
        footer = pq.read_metadata(parquet_source(file))
        sizes = [footer.row_group(number).total_byte_size for number in range(footer.num_row_groups)]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadInputError(
            f"{file.path}: the end of this parquet file cannot be read, so it cannot be divided",
            found=str(error).splitlines()[0],
            fix="download or write the file again",
        ) from error
    total, starts, before = max(sum(sizes), 1), [0], 0
    for size in sizes[:-1]:
        before += size
        starts.append(file.size_bytes * before // total)
    return starts


def _is_text(column: pq.ColumnSchema) -> bool:
    return column.physical_type == "BYTE_ARRAY" and column.logical_type.type in ("STRING", "JSON", "ENUM", "NONE")


def _is_in(path: str, names: Sequence[str]) -> bool:
    """Whether a leaf belongs to one of these columns."""
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _leaves(opened: pq.ParquetFile) -> list[str]:
    return [opened.schema.column(number).path for number in range(len(opened.schema))]


def _largest_entry(encoded: pq.ParquetFile, group: int, names: list[str], places: Sequence[ColumnPath]) -> int:
    """Bytes of the largest entry in the dictionaries of a row group, which come with its first row."""
    largest = 1
    try:
        batch = next(encoded.iter_batches(1, row_groups=[group], columns=names, use_threads=False), None)
    except OSError as error:
        if not str(error).startswith("Not yet implemented"):
            raise
        return arrow_columns.DECODED_BYTES  # an encoding without dictionaries: row by row if another column has one
    for array in (at(batch, place.path) for place in places if place.kind == "text") if batch is not None else ():
        values = array.flatten() if item_type(array.type) else array
        if pa.types.is_dictionary(values.type):
            largest = max(largest, int(sizes_of(values.dictionary).max(initial=0)))
    return largest
