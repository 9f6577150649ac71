"""Text that can be read only once, from its beginning: compressed files and standard input.

A stream yields its chunks in order. It holds one chunk and the rest of its last record; the rest of a record that is
too long is skipped. Waits for standard input last a fraction of a second, so that its reader can be stopped.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path

from mdata.errors import BadInputError, UsageError, explain_os_error
from mdata.object_storage.facts import ObjectFacts
from mdata.sources.decompress import READ_BYTES, DamagedError, TooLargeError, decompress
from mdata.sources.input_files import (
    HEAD_BYTES,
    STDIN,
    SourceFile,
    begins_like_text,
    compression_of,
    format_by_content,
    refuse_foreign_text,
)
from mdata.sources.record_batch import ChunkContent, ReadSpec
from mdata.sources.record_boundaries import MOST_LOOK_BACK, read_span, read_start
from mdata.sources.warc import record_spans
from mdata.util.background import ClosedError

_WAIT_S = 0.1


def stream_chunks(
    file: SourceFile, chunk_bytes: int, *, spec: ReadSpec, whole: bool, stopped: Callable[[], bool]
) -> Iterator[ChunkContent]:
    """The chunks of a compressed file, an object or standard input; if `whole`, the text is one chunk.

    Reading a section of an object starts a little before its beginning.

    Raises:
        BadInputError: the compressed data is damaged, or takes too much memory.
        UsageError: the file cannot be read.
    """
    raw = _RawBytes(file, stopped)
    begin, end = file.section[:2] if file.section and file.compression == "none" else (0, None)
    text = _StreamText(raw, raw.start)
    try:
        if raw.start == 0:
            refuse_foreign_text(file, text.read(0, HEAD_BYTES), raw.compression)
        if whole:
            data = read_start(text, spec)
            # The rest is read to verify its checksums.
            while text.read(text.end, READ_BYTES):
                text.drop(text.end)
            yield ChunkContent(0, text.end, data, raw.consumed())
            return
        if file.format == "warc":
            yield from _record_chunks(raw, text, chunk_bytes, longest=spec.max_record_bytes)
            return
        start = begin
        has_more = bool(text.read(start, 1))
        while has_more:
            stop = start + chunk_bytes if end is None else min(start + chunk_bytes, end)
            data = read_span(text, start, stop=stop, format=file.format, spec=spec)
            text.drop(stop - MOST_LOOK_BACK)
            # Before the last chunk is yielded, everything after the text (checksums, padding) is read as well.
            has_more = stop != end and bool(text.read(stop, 1))
            yield ChunkContent(start, min(stop, text.end), data, raw.consumed())
            start = stop
    except DamagedError as error:
        raise BadInputError(
            f"{file.path}: the {raw.compression} data is damaged after {text.end} bytes of text",
            found=str(error),
            fix="download or compress the file again",
        ) from error
    except TooLargeError as error:
        raise BadInputError(
            f"{file.path}: decompressing its {raw.compression} data takes too much memory",
            found=str(error),
            fix="compress the file again, with a smaller window or dictionary",
        ) from error
    except OSError as error:
        raise explain_os_error(error, "reading the input") from error


def _record_chunks(raw: _RawBytes, text: _StreamText, chunk_bytes: int, *, longest: int) -> Iterator[ChunkContent]:
    """Whole records of WARC; a chunk ends with the record that fills it."""
    held: list[bytes] = []
    filled = begin = 0
    for start, data in record_spans(text, raw.file, longest=longest):
        if filled >= chunk_bytes:
            yield ChunkContent(begin, start, b"".join(held), raw.consumed())
            held, filled, begin = [], 0, start
        held.append(data)
        filled += len(data)
    if held:
        yield ChunkContent(begin, text.end, b"".join(held), raw.consumed())


class _RawBytes:
    """A file or standard input as blocks of decompressed text, and a count of the bytes read from disk."""

    def __init__(self, file: SourceFile, stopped: Callable[[], bool]) -> None:
        self.file = file
        self.compression = file.compression
        self._stopped = stopped
        self._read = self._reported = 0
        section = file.section if file.as_object and file.compression == "none" else None
        self.start = max(section.start - MOST_LOOK_BACK, 0) if section else 0

    def __iter__(self) -> Iterator[bytes]:
        if facts := self.file.as_object:
            yield from decompress(self._blocks_of_object(facts), self.compression)
            return
        if self.file.path != STDIN:
            assert isinstance(self.file.path, Path), "an object was read above"
            with self.file.path.open("rb", buffering=0) as file:
                yield from decompress(self._blocks(file.fileno()), self.compression)
            return
        blocks = self._blocks(0)
        head = b""
        while len(head) < HEAD_BYTES and (block := next(blocks, b"")):
            head += block
        is_text = self.file.format == "text" and begins_like_text(head)
        if (found := format_by_content(head)) in ("parquet", "arrow") and not is_text:
            raise UsageError(f"{found} cannot be read from standard input", fix="name the file")
        self.compression = compression_of(head)
        yield from decompress(chain([head] if head else [], blocks), self.compression)

    def consumed(self) -> int:
        """Bytes of the file that were read since the last call."""
        new, self._reported = self._read - self._reported, self._read
        return new

    def _blocks_of_object(self, facts: ObjectFacts) -> Iterator[bytes]:
        from mdata.object_storage.reading import blocks_ahead

        with closing(blocks_ahead(facts, self.start)) as blocks:
            for data in blocks:
                if self._stopped():
                    raise ClosedError
                self._read += len(data)
                yield data

    def _blocks(self, descriptor: int) -> Iterator[bytes]:
        while True:
            while self.file.path == STDIN and not select.select([descriptor], [], [], _WAIT_S)[0]:
                if self._stopped():
                    raise ClosedError
            if self._stopped():
                raise ClosedError
            data = os.read(descriptor, READ_BYTES)
            if not data:
                return
            self._read += len(data)
            yield data


class _StreamText:
    """A `Text` that is buffered from some offset on."""

    def __init__(self, blocks: _RawBytes, base: int) -> None:
        self._blocks = iter(blocks)
        self._buffer = bytearray()
        self._base = base

    @property
    def end(self) -> int:
        """How far the text was read; at its end, its length."""
        return self._base + len(self._buffer)

    def read(self, offset: int, size: int) -> bytes:
        """The bytes [offset, offset + size); fewer at the end of the text only."""
        assert offset >= self._base, f"byte {offset} of a stream was dropped before {self._base}"
        while self.end < offset + size:
            block = next(self._blocks, None)
            if block is None:
                break
            self._buffer += block
        at = offset - self._base
        with memoryview(self._buffer) as view:
            return bytes(view[at : at + size])

    def drop(self, offset: int) -> None:
        """Forget what comes before an offset."""
        if offset > self._base:
            offset = min(offset, self.end)
            del self._buffer[: offset - self._base]
            self._base = offset
