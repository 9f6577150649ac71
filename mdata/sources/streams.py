"""Text that can be read only once, from its beginning: compressed files and standard input.

A stream yields its chunks in order. It holds one chunk and the rest of its last record; the rest of a record that is
too long is skipped. Waits for standard input last a fraction of a second, so that its reader can be stopped.

gzip, zstd, bzip2 and xz are decompressed member by member, in bounded memory. A file may have several members; zero
padding between and after gzip members and xz streams is legal, and so are zstd's skippable frames. Anything else after
the end, a missing end and a wrong checksum are damage. No step returns more than a few megabytes of text, even for
malicious files.
"""

from __future__ import annotations

import bz2
import lzma
import os
import select
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from mdata.errors import BadInputError, UsageError, explain_os_error
from mdata.object_storage.facts import ObjectFacts
from mdata.sources import tar_members
from mdata.sources.csv_rows import row_spans
from mdata.sources.input_files import (
    HEAD_BYTES,
    STDIN,
    Compression,
    SourceFile,
    begins_like_text,
    compression_of,
    format_by_content,
    refuse_foreign_text,
)
from mdata.sources.mediawiki import page_spans
from mdata.sources.record_batch import ArchiveMember, ChunkContent, ReadSpec
from mdata.sources.record_boundaries import MOST_LOOK_BACK, read_span, read_start
from mdata.sources.warc import record_spans
from mdata.util.background import ClosedError

if TYPE_CHECKING:
    import zstandard


_WAIT_S = 0.1


def stream_chunks(
    file: SourceFile, chunk_bytes: int, *, spec: ReadSpec, one_chunk: bool, stopped: Callable[[], bool]
) -> Iterator[ChunkContent]:
    """The chunks of a compressed file, an object or standard input; if `one_chunk`, the text is one chunk.

    Reading a section of an object starts a little before its beginning.

    Raises:
        BadInputError: the compressed data is damaged, or takes too much memory.
        UsageError: the file cannot be read.
    """
    raw = _RawBytes(file, stopped)
    begin, end = file.section[:2] if file.section and file.compression == "none" else (0, None)
    text = _StreamText(raw, raw.start, keep_torn=spec.keep_torn)
    try:
        if raw.start == 0:
            refuse_foreign_text(file, text.read(0, HEAD_BYTES), raw.compression)
        if one_chunk:
            data = read_start(text, spec)
            # The rest is read to verify its checksums.
            while text.read(text.end, READ_BYTES):
                text.drop(text.end)
            yield ChunkContent(0, text.end, data, raw.consumed(), _damage_of(text, raw))
            return
        if file.format in ("csv", "tsv", "warc", "tar", "mediawiki"):
            yield from _record_chunks(raw, text, chunk_bytes, spec=spec)
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


def _record_chunks(raw: _RawBytes, text: _StreamText, chunk_bytes: int, *, spec: ReadSpec) -> Iterator[ChunkContent]:
    """Whole records of WARC, or pages and rows behind their file's head; a chunk ends with the record that fills it."""
    if raw.file.format == "tar":
        yield from _member_chunks(raw, text, chunk_bytes, spec=spec)
        return
    if raw.file.format in ("csv", "tsv"):
        spans = row_spans(text, raw.file, spec=spec)
    else:
        spans = (record_spans if raw.file.format == "warc" else page_spans)(
            text, raw.file, longest=spec.max_record_bytes
        )
    held: list[bytes] = []
    filled = begin = 0
    head, damage = b"", ""
    try:
        if raw.file.format != "warc":
            head = next(spans, (0, b""))[1]
        for start, data in spans:
            if filled >= chunk_bytes:
                yield ChunkContent(begin, start, head + b"".join(held), raw.consumed())
                held, filled, begin = [], 0, start
            held.append(data)
            filled += len(data)
    except BadInputError as error:
        if not spec.keep_torn:
            raise
        # Its problem and what was found; what to do is said for all bad rows.
        lines = str(error).removeprefix(f"{raw.file.path}: ").split("\n")
        damage = ": ".join(line.removeprefix("  found: ") for line in lines if not line.startswith("  try: "))
    damage = _damage_of(text, raw) or damage
    if held or damage:
        yield ChunkContent(begin, text.end, head + b"".join(held), raw.consumed(), damage)


def _member_chunks(raw: _RawBytes, text: _StreamText, chunk_bytes: int, *, spec: ReadSpec) -> Iterator[ChunkContent]:
    """Rows of an archive, and which of its members they are from."""
    held: list[bytes] = []
    members: list[ArchiveMember] = []
    filled = begin = num_rows = 0
    for start, data, rows, names, line in tar_members.row_spans(text, raw.file, spec=spec):
        if filled >= chunk_bytes:
            yield ChunkContent(begin, start, b"".join(held), raw.consumed(), members=tuple(members))
            held, members, filled, num_rows, begin = [], [], 0, 0, start
        held.append(data)
        filled += len(data)
        if line <= 1 or not members:
            members.append(ArchiveMember(num_rows + 1, names, line))
        num_rows += rows
    if held:
        yield ChunkContent(begin, text.end, b"".join(held), raw.consumed(), members=tuple(members))


def _damage_of(text: _StreamText, raw: _RawBytes) -> str:
    if text.damage is None:
        return ""
    return f"the {raw.compression} data is damaged after {text.end:,} bytes of text: {text.damage}"


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
        if (content_format := format_by_content(head)) in ("parquet", "arrow") and not is_text:
            raise UsageError(f"{content_format} cannot be read from standard input", fix="name the file")
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
    """A `SeekableText` that is buffered from some offset on.

    Attributes:
        damage: what ended the text, if `keep_torn`; otherwise it is raised.
    """

    def __init__(self, blocks: _RawBytes, base: int, *, keep_torn: bool = False) -> None:
        self.damage: DamagedError | None = None
        self._keep_torn = keep_torn
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
            try:
                block = next(self._blocks, None)
            except DamagedError as error:
                if not self._keep_torn:
                    raise
                self.damage, block = error, None
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


READ_BYTES = 1 << 17
_STEP_BYTES = 1 << 18
# One step of zstandard returns everything in its input: at worst a block of 128 KiB for each 4 bytes.
_ZSTD_STEP_BYTES = 1 << 11
_ZSTD_SMALL_STEP_BYTES = 1 << 8
_ZSTD_TEXT_BYTES = 1 << 15
# The largest preset of xz needs 65 MiB.
_XZ_MEMORY_BYTES = 1 << 28
# The largest window of `zstd --long=31`; it takes memory only as far as text fills it.
_ZSTD_WINDOW_BYTES = 1 << 31
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_HEADER_BYTES = 18  # at most

# Takes compressed bytes and a source of more; yields text, and returns the bytes after the member's end.
Member = Callable[[bytes, Callable[[], bytes]], Generator[bytes, None, bytes]]


class DamagedError(Exception):
    """The compressed data is damaged; the message says how."""


class TooLargeError(Exception):
    """The data seems valid, but decompressing it takes more memory than the limit; the message says how much."""


def decompress(blocks: Iterator[bytes], compression: Compression) -> Iterator[bytes]:
    """Blocks of a compressed file as blocks of text.

    Raises:
        DamagedError: the data is damaged or truncated. TooLargeError: it needs too much memory.
    """
    if compression == "none":
        yield from blocks
        return
    import zstandard

    try:
        yield from _members(blocks, compression)
    except (zlib.error, lzma.LZMAError, zstandard.ZstdError, EOFError) as error:
        raise DamagedError(str(error)) from error
    except OSError as error:
        # bzip2 reports damage as an OSError without a number.
        if error.errno is not None:
            raise
        raise DamagedError(str(error)) from error


def _members(blocks: Iterator[bytes], compression: Compression) -> Iterator[bytes]:
    member: Member = {"gzip": _gzip, "zstd": _zstd, "bzip2": _bzip2, "xz": _xz}[compression]
    padding = b"\0" if compression in ("gzip", "xz") else b""

    def more() -> bytes:
        data = next(blocks, b"")
        if not data:
            raise DamagedError(f"it ends in the middle of {compression} data")
        return data

    rest = next(blocks, b"")
    while rest:
        rest = yield from member(rest, more)
        rest = rest or next(blocks, b"")
        while padding and rest and not (rest := rest.lstrip(padding)):
            rest = next(blocks, b"")


def _gzip(data: bytes, more: Callable[[], bytes]) -> Generator[bytes, None, bytes]:
    # zlib reads header and checksum itself, in half the time of gzip.GzipFile.
    decompressor = zlib.decompressobj(wbits=31)
    while not decompressor.eof:
        yield decompressor.decompress(data or more(), _STEP_BYTES)
        data = decompressor.unconsumed_tail
    return decompressor.unused_data


def _zstd(data: bytes, more: Callable[[], bytes]) -> Generator[bytes, None, bytes]:
    import zstandard

    data = _with_header(data, more)
    window = _window(data)
    if window > _ZSTD_WINDOW_BYTES:
        raise TooLargeError(
            f"a window of {window:,} bytes; the limit is {_ZSTD_WINDOW_BYTES:,} (zstd --ultra --long=31)"
        )
    frames = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    decompressor: zstandard.ZstdDecompressionObj = frames.decompressobj(_ZSTD_TEXT_BYTES)
    step, at = _ZSTD_STEP_BYTES, 0
    while True:
        if at >= len(data):
            data, at = more(), 0
        text = decompressor.decompress(data[at : at + step])
        at += step
        yield text
        if decompressor.eof:
            return decompressor.unused_data + data[at:]
        step = _ZSTD_SMALL_STEP_BYTES if len(text) > _STEP_BYTES else _ZSTD_STEP_BYTES


def _with_header(data: bytes, more: Callable[[], bytes]) -> bytes:
    """Enough of a frame to contain all of its header; a whole frame may be shorter."""
    try:
        while len(data) < _ZSTD_HEADER_BYTES:
            data += more()
    except DamagedError:
        pass  # the decompressor reports a truncated frame
    return data


def _window(data: bytes) -> int:
    """The window that a frame needs, in bytes (RFC 8878, 3.1.1.1); 0 if no frame begins here.

    The library reports only windows that it accepts.
    """
    if len(data) < 6 or data[:4] != _ZSTD_MAGIC:
        return 0
    flags = data[4]
    if not flags & 0x20:
        smallest = 1 << (10 + (data[5] >> 3))
        return smallest + smallest // 8 * (data[5] & 7)
    # A single segment: the window is the content, whose size follows the number of a dictionary.
    start, size = 5 + (0, 1, 2, 4)[flags & 3], (1, 2, 4, 8)[flags >> 6]
    return int.from_bytes(data[start : start + size], "little") + (256 if size == 2 else 0)


def _bzip2(data: bytes, more: Callable[[], bytes]) -> Generator[bytes, None, bytes]:
    return (yield from _buffered(bz2.BZ2Decompressor(), data, more))


def _xz(data: bytes, more: Callable[[], bytes]) -> Generator[bytes, None, bytes]:
    try:
        return (yield from _buffered(lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES), data, more))
    except lzma.LZMAError as error:
        if "emory usage limit" not in str(error):
            raise
        raise TooLargeError(f"more than the limit of {_XZ_MEMORY_BYTES:,} bytes (xz -9 takes 68 MB)") from error


def _buffered(
    decompressor: bz2.BZ2Decompressor | lzma.LZMADecompressor, data: bytes, more: Callable[[], bytes]
) -> Generator[bytes, None, bytes]:
    """One member, for decompressors that keep unused input themselves."""
    while not decompressor.eof:
        chunk = (data or more()) if decompressor.needs_input else b""
        data = b"" if chunk else data
        yield decompressor.decompress(chunk, _STEP_BYTES)
    return decompressor.unused_data
