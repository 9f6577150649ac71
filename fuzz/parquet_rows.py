"""Parquet files: whatever the bytes, a typed error that names the file, or rows that can be parsed.

The first byte chooses. Raw: the rest, between parquet's two marks, is the file. Patched: one of a few sound files, in
which groups of four bytes change one byte each (three say where, from the end, one what it becomes), so that the
checks behind the footer are reached; sound files that were not changed must give their own rows. Nothing but
BadInputError, UsageError and ResourceError may come out of reading and of parsing what was read. pyarrow itself is not
instrumented: a crash of it is found, new paths inside it are not.
"""

from __future__ import annotations

import functools
import io

import pyarrow as pa
import pyarrow.parquet as pq

from fuzz.harness import scratch
from mdata.errors import BadInputError, ResourceError, UsageError
from mdata.sources.chunk import chunks, read_chunk
from mdata.sources.input_files import find_inputs
from mdata.sources.parse import parse
from mdata.sources.record_batch import ReadSpec

TEXTS = ["a text", "", "caf\u00e9 " * 9, "the last one"] * 3
KEYS = (("text",), ("many",), ("meta.text", "text"), ("nothing",))
COLUMNS = {
    "text": pa.array(TEXTS),
    "many": pa.array([[text, "x"] for text in TEXTS]),
    "meta": pa.array([{"text": text, "n": 1} for text in TEXTS]),
}


@functools.cache
def sound() -> tuple[bytes, ...]:
    """Small files of several kinds of pages."""
    made = []
    for options in (
        {"compression": "none", "use_dictionary": False},
        {"compression": "snappy", "row_group_size": 5},
        {"compression": "zstd", "data_page_version": "2.0", "data_page_size": 32, "write_page_checksum": True},
        {"compression": "gzip", "column_encoding": {"text": "DELTA_BYTE_ARRAY"}, "use_dictionary": False},
    ):
        target = io.BytesIO()
        pq.write_table(pa.table(COLUMNS), target, **options)
        made.append(target.getvalue())
    return tuple(made)


def check(data: bytes) -> None:
    """One file."""
    choice, rest = (data[0] if data else 0), data[1:]
    path = scratch() / "x.parquet"
    path.write_bytes(patched(choice >> 1 & 3, rest) if choice & 1 else b"PAR1" + rest + b"PAR1")
    spec = ReadSpec(json_keys=KEYS[choice >> 3 & 3], max_record_bytes=(1 << 20, 20)[choice >> 5 & 1])
    try:
        (file,) = find_inputs([path]).files  # without its first mark a file is lines of JSON
        found = [parse(file.format, read_chunk(chunk, spec), spec=spec) for chunk in chunks([file], 64, spec=spec)]
    except (BadInputError, UsageError, ResourceError) as error:
        assert str(path) in str(error) and str(error).count("\n") <= 3, str(error)
        str(error).encode()
        assert rest or not choice & 1 or spec.json_keys == ("nothing",), f"a sound file was refused: {error}"
        return
    for batch in found:
        for column in batch.columns:
            "".join(column.sentences).encode()
    if choice & 1 and not rest and spec.json_keys[-1] == "text" and spec.max_record_bytes > 20:
        assert [text for batch in found for text in batch.columns[-1].sentences] == TEXTS


def patched(number: int, changes: bytes) -> bytes:
    """A sound file with some bytes changed; most of what decides lies near the end."""
    file = bytearray(sound()[number])
    for at in range(0, len(changes) - 3, 4):
        place = int.from_bytes(changes[at : at + 3], "little") % len(file)
        file[-1 - place] = changes[at + 3]
    return bytes(file)
