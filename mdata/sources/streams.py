"""Text that can be read once, from its beginning: packed files and standard input.

A stream gives its pieces in order, holding one piece and what its last record runs on; the rest of a record
that is too long is passed over. Standard input is read in waits of a fraction of a second, so that who reads
it can be stopped. `Part` is a piece before it has its numbers.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

from mdata.errors import BadInputError, UsageError, explain_os_error
from mdata.sources.decompress import READ_BYTES, DamagedError, TooLargeError, unpack
from mdata.sources.input_files import HEAD_BYTES, STDIN, SourceFile, compression_of, refuse_foreign
from mdata.sources.record_batch import ReadSpec
from mdata.sources.record_boundaries import LINES, OVERHANG, PARAGRAPHS, piece_span, without_blank_end
from mdata.util.background import ClosedError

_WAIT_S = 0.1
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Part(NamedTuple):
    """A piece of one file: what it stands for, its records, and bytes of the file as it lies on disk."""

    start: int
    stop: int
    data: bytes
    file_bytes: int


def stream_parts(file: SourceFile, piece_bytes: int, *, spec: ReadSpec, stopped: Callable[[], bool]) -> Iterator[Part]:
    """The pieces of a packed file or of standard input.

    Raises:
        BadInputError: the packed data is damaged, or takes too much memory.
        UsageError: the file cannot be read.
    """
    packed = _Packed(file, stopped)
    text = _Stream(packed)
    try:
        if file.format == "text" and spec.text_documents == "file":
            yield _whole(text, packed, spec)
        else:
            yield from _parts(text, packed, piece_bytes, spec=spec)
    except DamagedError as error:
        raise BadInputError(
            f"{file.path}: the {packed.compression} data is damaged after {text.end} bytes of text",
            found=str(error),
            fix="fetch or compress the file again",
        ) from error
    except TooLargeError as error:
        raise BadInputError(
            f"{file.path}: to unpack its {packed.compression} data takes too much memory",
            found=str(error),
            fix="compress the file again, with a smaller window or dictionary",
        ) from error
    except OSError as error:
        raise explain_os_error(error, "reading the input") from error


def _whole(text: _Stream, packed: _Packed, spec: ReadSpec) -> Part:
    """The whole text as one piece, cut where it is too long; its rest is read for the sake of its checks."""
    data = text.read(0, spec.max_record_bytes + OVERHANG)
    while text.read(text.end, READ_BYTES):
        text.drop(text.end)
    return Part(0, text.end, without_mark(data), packed.taken())


def _parts(text: _Stream, packed: _Packed, piece_bytes: int, *, spec: ReadSpec) -> Iterator[Part]:
    rule = PARAGRAPHS if packed.file.format == "text" else LINES
    start = 0
    there = text.read(0, 1)
    while there:
        stop = start + piece_bytes
        first, last = piece_span(text, start, stop=stop, rule=rule, longest=spec.max_record_bytes)
        data = text.read(first, last - first)
        if start == 0 and packed.file.format == "text":
            data = without_mark(data)
        text.drop(stop - rule.look_back)
        # Before the last piece goes out, all that follows the text (checksums, padding) was read as well.
        there = text.read(stop, 1)
        if rule is LINES and not text.read(last, 1):
            data = without_blank_end(data, spec.max_record_bytes)
        yield Part(start, min(stop, text.end), data, packed.taken())
        start = stop


def without_mark(data: bytes) -> bytes:
    """Plain text without the byte order mark that some editors put before it."""
    return data.removeprefix(BYTE_ORDER_MARK)


class _Packed:
    """The bytes of a file or of standard input as text chunks, counted as they lie on disk."""

    def __init__(self, file: SourceFile, stopped: Callable[[], bool]) -> None:
        self.file = file
        self.compression = file.compression
        self._stopped = stopped
        self._read = self._told = 0

    def __iter__(self) -> Iterator[bytes]:
        if self.file.path != STDIN:
            with self.file.path.open("rb", buffering=0) as file:
                yield from unpack(self._chunks(file.fileno()), self.compression)
            return
        chunks = self._chunks(0)
        head = b""
        while len(head) < HEAD_BYTES and (chunk := next(chunks, b"")):
            head += chunk
        refuse_foreign(STDIN, head)
        if head.startswith(b"PAR1"):
            raise UsageError("parquet cannot be read from standard input", fix="name the file")
        self.compression = compression_of(head)
        yield from unpack(chain([head] if head else [], chunks), self.compression)

    def taken(self) -> int:
        """Bytes of the file that were read since the last call."""
        new, self._told = self._read - self._told, self._read
        return new

    def _chunks(self, descriptor: int) -> Iterator[bytes]:
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


class _Stream:
    """Text that is kept from some place on."""

    def __init__(self, chunks: _Packed) -> None:
        self._chunks = iter(chunks)
        self._kept = bytearray()
        self._base = 0

    @property
    def end(self) -> int:
        """How far the text was read; its length once it ended."""
        return self._base + len(self._kept)

    def read(self, place: int, size: int) -> bytes:
        """The bytes [place, place + size); fewer at the end of the text only."""
        assert place >= self._base, f"byte {place} of a stream was dropped before {self._base}"
        while self.end < place + size:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._kept += chunk
        at = place - self._base
        with memoryview(self._kept) as kept:
            return bytes(kept[at : at + size])

    def drop(self, place: int) -> None:
        """Forget what comes before a place."""
        if place > self._base:
            place = min(place, self.end)
            del self._kept[: place - self._base]
            self._base = place
