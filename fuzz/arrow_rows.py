"""Arrow files and streams: whatever the bytes, a typed error that names the file, or rows that can be parsed.

The first byte chooses. Raw: the rest, behind the mark of a stream or of a file, is the file. Patched: one of a few
sound files, in which groups of four bytes change one byte each (three say where, one what it becomes), so that offsets
and lengths inside of batches are reached; sound files that were not changed must give their own rows. Nothing but
BadInputError, UsageError and ResourceError may come out. pyarrow itself is not instrumented: a crash of it is found,
new paths inside it are not.
"""

from __future__ import annotations

import functools
import io

import pyarrow as pa

from fuzz.harness import scratch
from mdata.errors import BadInputError, ResourceError, UsageError
from mdata.sources.chunk import chunks, read_chunk
from mdata.sources.input_files import find_inputs
from mdata.sources.parse import parse
from mdata.sources.record_batch import ReadSpec
from mdata.sources.sections import PartNumber, files_of_part

TEXTS = ["a text", "", "caf\u00e9 " * 9, "the last one"] * 3
KEYS = (("text",), ("many",), ("meta.text", "text"), ("coded",))
COLUMNS = {
    "text": pa.array(TEXTS),
    "many": pa.array([[text, "x"] for text in TEXTS]),
    "meta": pa.StructArray.from_arrays([pa.array(TEXTS, pa.string_view()), pa.array(range(12))], ["text", "n"]),
    "coded": pa.array(TEXTS).dictionary_encode(),
}  # fmt: skip


@functools.cache
def sound() -> tuple[bytes, ...]:
    """Small files of both forms."""
    made = []
    for maker, compression, rows in (
        (pa.ipc.new_file, None, 5), (pa.ipc.new_stream, None, 12), (pa.ipc.new_stream, "zstd", 7),
        (pa.ipc.new_file, "lz4", 12),
    ):  # fmt: skip
        target, table = io.BytesIO(), pa.table(COLUMNS)
        with maker(target, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            writer.write_table(table, max_chunksize=rows)
        made.append(target.getvalue())
    return tuple(made)


def check(data: bytes) -> None:
    """One file."""
    choice, rest = (data[0] if data else 0), data[1:]
    path = scratch() / "x.arrow"
    raw = (b"\xff\xff\xff\xff", b"ARROW1\0\0")[choice >> 1 & 1] + rest
    path.write_bytes(patched(choice >> 1 & 3, rest) if choice & 1 else raw)
    spec = ReadSpec(json_keys=KEYS[choice >> 3 & 3], max_record_bytes=(1 << 20, 20)[choice >> 5 & 1])
    part = PartNumber(1 + (choice >> 6 & 1), 2)
    try:
        (file,) = find_inputs([path]).files
        found = [parse(file.format, read_chunk(chunk, spec), spec=spec) for chunk in chunks([file], 64, spec=spec)]
        halves = files_of_part([file], part, chunk_bytes=64, text_is_whole=True)
        list(chunks(halves, 64, spec=spec))
    except (BadInputError, UsageError, ResourceError) as error:
        assert str(path) in str(error) and str(error).count("\n") <= 3, str(error)
        str(error).encode()
        assert rest or not choice & 1, f"a sound file was refused: {error}"
        return
    for batch in found:
        for column in batch.columns:
            "".join(column.sentences).encode()
    if choice & 1 and not rest and len(spec.json_keys[-1]) > 4 - (spec.json_keys[-1] == "text"):
        good = [text for batch in found for text in batch.columns[-1].sentences]
        assert good == [text for text in TEXTS if len(text.encode()) <= spec.max_record_bytes]


def patched(number: int, changes: bytes) -> bytes:
    """A sound file with some bytes changed."""
    file = bytearray(sound()[number])
    for at in range(0, len(changes) - 3, 4):
        file[int.from_bytes(changes[at : at + 3], "little") % len(file)] = changes[at + 3]
    return bytes(file)
