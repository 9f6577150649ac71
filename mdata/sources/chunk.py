"""Input files as chunks of bounded size; the chunks are the same however a text is compressed.

Chunk k of a file is the lines that *begin* in bytes [k * chunk_bytes, (k + 1) * chunk_bytes) of its decompressed text,
so that each line belongs to exactly one chunk. A plain file is divided without being read, and the parser reads its
chunks; a stream (compressed, standard input, CSV, parquet, Arrow, WARC) is read here, by a few threads that read
ahead, and its chunks carry their data. A line that continues past its chunk is read up to a little more than
`max_record_bytes`, so that the parser sees that it is too long. Plain text with one document per file is one chunk; a
chunk of parquet or Arrow is consecutive rows, one of WARC whole records.

Slow twin: tests/reference/sources.py.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3

from mdata.errors import UsageError, counted, explain_os_error
from mdata.sources.input_files import SourceFile
from mdata.sources.record_batch import ArchiveMember, ChunkContent, ReadSpec
from mdata.sources.record_boundaries import read_span, read_start
from mdata.util.background import BackgroundIterator

# Chunks that may wait in each stream: enough that the next is ready when one is taken.
_CHUNKS_AHEAD = 2
# How many streams are decompressed at the same time.
_STREAMS_AHEAD = 4


@dataclass(frozen=True)
class Chunk:
    """A bounded part of one file.

    Args:
        file_number: of the file in the list.
        number: of the chunk in its file, or in the section that is read, from 0.
        source: the file.
        start, stop: its bytes in the decompressed text; for parquet and Arrow its rows.
        data: its records; None: `read_chunk` reads them.
        file_bytes: its size in the file on disk, for progress.
        damage, members: see `ChunkContent`.
    """

    file_number: int
    number: int
    source: SourceFile
    start: int
    stop: int
    data: bytes | None
    file_bytes: int
    damage: str = ""
    members: tuple[ArchiveMember, ...] = ()


def chunks(
    files: Sequence[SourceFile], chunk_bytes: int, *, spec: ReadSpec, start: tuple[int, int] = (0, 0)
) -> Generator[Chunk, None, None]:
    """All chunks of all files, in order.

    Closing the generator, or dropping it, ends its threads.

    Args:
        files: what to read.
        chunk_bytes: about how much text a chunk holds.
        spec: how to read records.
        start: (file number, chunk number) of the first chunk to return. A stream is still read from its beginning.

    Raises:
        BadInputError: compressed data or parquet is damaged; raised instead of the next chunk.
        UsageError: a file cannot be read, or lacks columns that the spec names.
    """
    assert chunk_bytes > 0, "a chunk holds at least one byte"
    wanted = range(start[0], len(files))
    for number in wanted:
        _check_keys(files[number], spec)
    waiting = deque(number for number in wanted if files[number].streamed)
    streams: dict[int, BackgroundIterator[ChunkContent]] = {}
    try:
        for number in wanted:
            while waiting and len(streams) < _STREAMS_AHEAD:
                nearest = waiting.popleft()
                streams[nearest] = _read_ahead(files[nearest], chunk_bytes, spec)
            first = start[1] if number == start[0] else 0
            if not files[number].streamed:
                yield from _divide(number, files[number], chunk_bytes, spec=spec, first=first)
                continue
            for index, content in enumerate(streams[number]):
                if index >= first:
                    yield Chunk(number, index, files[number], *content)
            streams.pop(number).close()
    finally:
        for stream in streams.values():
            stream.close()


def read_chunk(chunk: Chunk, spec: ReadSpec) -> bytes:
    """The bytes of the chunk's records.

    Raises:
        UsageError: the file cannot be read.
    """
    if chunk.data is not None:
        return chunk.data
    try:
        descriptor = os.open(chunk.source.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            text = _PlainText(descriptor)
            if _is_one_chunk(chunk.source, spec):
                return read_start(text, spec)
            return read_span(text, chunk.start, stop=chunk.stop, format=chunk.source.format, spec=spec)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise explain_os_error(error, "reading the input") from error


def chunk_digest(data: bytes) -> bytes:
    """The hash of one chunk; a file's hash is that of the concatenated hashes of its chunks."""
    return blake3(data).digest()


def _check_keys(file: SourceFile, spec: ReadSpec) -> None:
    if file.format not in ("text", "warc"):
        return
    kind = "plain text" if file.format == "text" else "WARC"
    if len(spec.json_keys) != 1:
        raise UsageError(
            f"{file.path} is {kind}, which has one text per document",
            found=f"{counted(len(spec.json_keys), 'key')}: {', '.join(spec.json_keys)}",
            fix=f"preprocess {kind} in a run of its own, with one key",
        )
    if file.format == "text" and (spec.template or spec.where):
        option = "--text-template" if spec.template else "--where"
        raise UsageError(f"{file.path} is plain text, which has no columns", fix=f"leave {option} out")


def _read_ahead(file: SourceFile, chunk_bytes: int, spec: ReadSpec) -> BackgroundIterator[ChunkContent]:
    def read(stopped: Callable[[], bool]) -> Iterator[ChunkContent]:
        if file.format == "parquet":
            from mdata.sources.parquet import parquet_chunks

            return parquet_chunks(file, chunk_bytes, spec=spec)
        if file.format == "arrow":
            from mdata.sources.arrow_files import arrow_chunks

            return arrow_chunks(file, chunk_bytes, spec=spec)
        from mdata.sources.streams import stream_chunks

        return stream_chunks(file, chunk_bytes, spec=spec, one_chunk=_is_one_chunk(file, spec), stopped=stopped)

    return BackgroundIterator(
        read, limit=_CHUNKS_AHEAD * chunk_bytes, weight=lambda content: len(content.data), name="mdata-read-ahead"
    )


def _is_one_chunk(file: SourceFile, spec: ReadSpec) -> bool:
    return file.format == "html" or (file.format == "text" and spec.text_documents == "file")


def _divide(file_number: int, file: SourceFile, chunk_bytes: int, *, spec: ReadSpec, first: int) -> Iterator[Chunk]:
    """The chunks of a plain file, without reading it."""
    one_chunk = _is_one_chunk(file, spec)
    begin, end = file.section[:2] if file.section else (0, file.size_bytes)
    step = max(end, 1) if one_chunk else chunk_bytes
    last = 1 if one_chunk else -(-(end - begin) // step)
    for number in range(first, last):
        start, stop = begin + number * step, min(begin + (number + 1) * step, end)
        yield Chunk(file_number, number, file, start, stop, None, stop - start)


class _PlainText:
    """An open file as a `SeekableText`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, offset: int, size: int) -> bytes:
        """The bytes [offset, offset + size); fewer at the end of the file only."""
        data = os.pread(self._descriptor, size, offset)
        while 0 < len(data) < size and (more := os.pread(self._descriptor, size - len(data), offset + len(data))):
            data += more
        return data
