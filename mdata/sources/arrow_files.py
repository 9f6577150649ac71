"""Arrow and Feather files and Arrow streams: their text columns in row order.

Both forms of Arrow's IPC format are read, including the `.arrow` files of datasets' `save_to_disk` and cache. A file is
mapped, so a record batch of any size takes memory only as its text is copied into chunks; a compressed batch is
decompressed whole, by column. The library trusts the offsets inside a batch; here they are checked before use. Units of
work are record batches, which are found from a file's footer, or a stream's message headers. Some writers (Polars) put
something else than a stream between the magic number and the footer, so a file is never read as a stream.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice

import pyarrow as pa

from mdata.errors import UsageError
from mdata.sources.arrow_columns import ColumnPath, at, damage_named, places_of, row_chunks, text_batches, with_bytes
from mdata.sources.input_files import ARROW_FILE, SourceFile
from mdata.sources.record_batch import ChunkContent, ReadSpec

# At the end of an Arrow file: the footer, its length, and the magic number.
_TAIL = struct.Struct("<i6s")
# A block of a footer: where a message begins, the length of its header, padding, the length of its body.
_BLOCK = struct.Struct("<qi4xq")
_RECORD_BATCHES = 3  # the number of this field of a footer (File.fbs of the format)


def arrow_chunks(file: SourceFile, chunk_bytes: int, *, spec: ReadSpec) -> Iterator[ChunkContent]:
    """The chunks of an Arrow file or stream.

    Raises:
        BadInputError: the file is damaged.
        UsageError: it cannot be read, or a key's column is missing or has another type.
    """
    rows = 0
    with damage_named(file, "Arrow", rows=lambda: rows):
        bounds = [*_batch_starts(file), file.size_bytes]
        first, stop = file.section[:2] if file.section else (0, len(bounds) - 1)
        # Rows at the end of each record batch.
        ends: list[int] = []

        def reached(rows: int) -> int:
            done = bisect_right(ends, rows)
            return file.disk_bytes if first + done == stop else bounds[first + done] - bounds[first]

        batches = _batches(file, spec, first=first, stop=stop, ends=ends)
        for content in row_chunks(batches, chunk_bytes, spec=spec, reached=reached):
            rows = content.stop
            yield content


def batch_starts(file: SourceFile) -> list[int]:
    """The byte at which each record batch begins, if the file's bytes are divided among them; the first is 0.

    Raises:
        BadInputError: the file is damaged.
    """
    with damage_named(file, "Arrow", rows=lambda: 0):
        return _batch_starts(file)


def _batch_starts(file: SourceFile) -> list[int]:
    starts = []
    with _opened(file) as mapped:
        if _is_file(mapped):
            # The library checks that the file ends with a footer.
            expected = pa.ipc.open_file(mapped).num_record_batches
            starts = _starts_in_footer(mapped, expected)
        else:
            begins = mapped.tell()
            for message in pa.ipc.MessageReader.open_stream(mapped):
                if message.type == "record batch":
                    starts.append(begins)
                begins = mapped.tell()
    # Bytes before the first batch, and a file without batches, count as the first batch.
    return [0, *starts[1:]]


def _starts_in_footer(mapped: pa.NativeFile, expected: int) -> list[int]:
    """Where the record batches of a file begin, from its footer, which the library does not show.

    Raises:
        ArrowInvalid: one of them is outside the file.
    """
    size = mapped.size()
    mapped.seek(size - _TAIL.size)
    length, _ = _TAIL.unpack(mapped.read(_TAIL.size))
    mapped.seek(size - _TAIL.size - length)
    footer = mapped.read(length)
    # A table begins with the distance back to its list of fields: their places in the table, two bytes each.
    (table,) = struct.unpack_from("<i", footer)
    (back,) = struct.unpack_from("<i", footer, table)
    fields = table - back
    (fields_bytes,) = struct.unpack_from("<H", footer, fields)
    at = 4 + 2 * _RECORD_BATCHES
    (place,) = struct.unpack_from("<H", footer, fields + at) if at < fields_bytes else (0,)
    starts: list[int] = []
    if place:
        place += table
        place += struct.unpack_from("<i", footer, place)[0]
        (count,) = struct.unpack_from("<i", footer, place)
        blocks = footer[place + 4 : place + 4 + count * _BLOCK.size]
        starts = [start for start, _, _ in _BLOCK.iter_unpack(blocks)]
    starts.sort()  # only to divide the bytes of the file; the order of rows is that of the footer
    if len(starts) != expected or (starts and not 0 < starts[0] <= starts[-1] < size):
        raise pa.ArrowInvalid(f"its footer names {expected} record batches, some of them outside the file")
    return starts


def _opened(file: SourceFile) -> pa.NativeFile:
    """The file for pyarrow: mapped, or ranges of an object, for which the bounds of batches cost another pass."""
    facts = file.as_object
    if facts is None:
        return pa.memory_map(str(file.path))
    from mdata.object_storage.reading import ObjectFile

    return pa.PythonFile(ObjectFile(facts), mode="r")


def _is_file(mapped: pa.NativeFile) -> bool:
    head = mapped.read(len(ARROW_FILE))
    mapped.seek(0)
    return bool(head == ARROW_FILE)


def _batches(file: SourceFile, spec: ReadSpec, *, first: int, stop: int, ends: list[int]) -> Iterator[pa.RecordBatch]:
    """The rows of record batches [first, stop); `ends` receives the rows at the end of each."""
    with _opened(file) as mapped:
        schema = _open(mapped).schema
        mapped.seek(0)
        places = places_of(schema, spec, file=file)
        wanted = sorted({schema.names.index(place.path[0]) for place in places if place.path})
        reader = _open(mapped, pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False))
        batches: Iterator[pa.RecordBatch]
        if isinstance(reader, pa.RecordBatchFileReader):
            batches = (reader.get_batch(number) for number in range(first, min(stop, reader.num_record_batches)))
        else:
            batches = islice(reader, first, stop)
        for batch in batches:
            _check_size(file)
            ends.append((ends[-1] if ends else 0) + len(batch))
            yield from text_batches([_sound(batch, place) for place in places], places, spec=spec)


def _open(
    mapped: pa.NativeFile, options: pa.ipc.IpcReadOptions | None = None
) -> pa.RecordBatchFileReader | pa.RecordBatchStreamReader:
    opener = pa.ipc.open_file if _is_file(mapped) else pa.ipc.open_stream
    return opener(mapped, options=options)


def _check_size(file: SourceFile) -> None:
    """A map of a truncated file must not be accessed: the system would kill the process."""
    if file.as_object is None and os.stat(file.path).st_size < file.size_bytes:  # noqa: PTH116
        raise UsageError(f"{file.path} became shorter while it was read", fix="wait until no program writes to it")


def _sound(batch: pa.RecordBatch, place: ColumnPath) -> pa.Array:
    """A column with texts as bytes, in which everything except UTF-8 was checked.

    Raises:
        ArrowInvalid: lengths or offsets outside the buffers.
    """
    if place.path:
        batch.column(place.path[0]).validate()
    array = at(batch, place.path)
    array = array.view(with_bytes(array.type))
    array.validate(full=True)
    return array
