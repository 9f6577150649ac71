"""Chunks of gzip, zstd, bzip2 and xz files: whatever the bytes, either a typed error or the library's own text.

The first byte chooses. Hostile: the rest is the file as it is; what is taken must be what Python's own module unpacks
in one call, and all that may come out otherwise is BadInputError or UsageError. Friendly: the rest is text, which is
packed in two members cut at the second byte; its chunks, of a size from the third, must be those of the plain file and
those of the slow twin (tests/reference/sources.py).
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from pathlib import Path

import zstandard

from fuzz.harness import scratch
from mdata.errors import BadInputError, UsageError
from mdata.sources.chunk import chunks, read_chunk
from mdata.sources.input_files import SourceFile, find_inputs
from mdata.sources.record_batch import ReadSpec
from tests.reference import sources as twin

PACKERS = {
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}
LIMITS = (0, 1, 9, 1 << 20)


def check(data: bytes) -> None:
    """One file."""
    if not data or data[0] & 1:
        hostile(data[1:])
    else:
        friendly(data[0], data[1:])


def hostile(data: bytes) -> None:
    """A file of any bytes."""
    path = scratch() / "hostile.jsonl"
    path.write_bytes(data)
    try:
        (file,) = find_inputs([path]).files
        found = b"".join(data for _, _, data in parts(file, 1 << 16, spec=ReadSpec()))
    except (BadInputError, UsageError) as error:
        assert str(error).count("\n") <= 3, str(error)
        return
    if file.format != "parquet":
        assert found == unpacked(data, file.compression), f"{file.compression}: not the library's text"


def friendly(choice: int, data: bytes) -> None:
    """A text packed by us."""
    cut, chunk_bytes = (data[0], 1 + data[1] % 64) if len(data) > 1 else (0, 1)
    text, compression = data[2:], list(PACKERS)[choice >> 1 & 3]
    ending = ".txt" if choice & 8 else ".jsonl"
    spec = ReadSpec(max_record_bytes=LIMITS[choice >> 4 & 3], text_documents="paragraph")
    pack = PACKERS[compression]
    try:
        file = written(f"plain{ending}", text)
    except UsageError:
        return  # it begins as a zip archive does, or the like
    if file.streamed:
        return  # it begins as packed data does
    plain = parts(file, chunk_bytes, spec=spec)
    packed = parts(written(f"packed{ending}", pack(text[:cut]) + pack(text[cut:])), chunk_bytes, spec=spec)
    assert packed == plain, f"{compression}: chunks differ from the plain file's"
    if ending == ".jsonl":
        by_twin = twin.chunks(text, chunk_bytes, by_paragraph=False, longest=spec.max_record_bytes, blank_end=False)
        assert [data for _, _, data in plain] == by_twin


def written(name: str, data: bytes) -> SourceFile:
    """A file of the bytes, as the engine finds it."""
    path: Path = scratch() / name
    path.write_bytes(data)
    (file,) = find_inputs([path]).files
    return file


def parts(file: SourceFile, chunk_bytes: int, *, spec: ReadSpec) -> list[tuple[int, int, bytes]]:
    """Start, stop and bytes of every chunk."""
    return [(chunk.start, chunk.stop, read_chunk(chunk, spec)) for chunk in chunks([file], chunk_bytes, spec=spec)]


def unpacked(data: bytes, compression: str) -> bytes:
    """The whole text by the library's simplest call."""
    if compression == "zstd":
        frames = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        return frames.stream_reader(io.BytesIO(data), read_across_frames=True).read()
    if compression == "xz":
        return unpacked_xz(data)
    if compression == "none":
        return data
    return gzip.decompress(data) if compression == "gzip" else bz2.decompress(data)


def unpacked_xz(data: bytes) -> bytes:
    """Stream by stream, because `lzma.decompress` stops without a word at padding."""
    text = b""
    while data:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        text += stream.decompress(data)
        assert stream.eof, "a stream that does not end"
        data = stream.unused_data.lstrip(b"\0")
    return text
