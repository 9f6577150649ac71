"""Pieces of bounded size, the same whatever a text is packed in.

Piece k of a file is the lines that *begin* in bytes [k * piece_bytes, (k + 1) * piece_bytes) of its unpacked
text, so that neighbours agree on every line wherever the cut falls. A plain file is planned without reading
it, and whoever parses a piece reads it; a stream (packed, standard input, parquet) is read here, by a few
threads that run ahead, and its pieces carry their data. A line that runs on past its piece is held up to
`max_record_bytes` and a little more, which is how a parser sees that it is too long. Plain text that is one
document a file is one piece; a piece of parquet is consecutive rows.

Slow twin: mdata/reference/sources.py.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from blake3 import blake3

from mdata.errors import UsageError, explain_os_error
from mdata.sources.input_files import SourceFile
from mdata.sources.record_batch import ReadSpec
from mdata.sources.record_boundaries import LINES, OVERHANG, PARAGRAPHS, piece_span, without_blank_end
from mdata.sources.streams import Part, stream_parts, without_mark
from mdata.util.background import BackgroundIterator

# What may wait in each stream, in pieces: enough that the next is there when one is taken.
_PIECES_AHEAD = 2


@dataclass(frozen=True)
class Piece:
    """A bounded part of one file.

    Args:
        file_number: of the file in the list.
        number: of the piece in its file, from 0.
        source: the file.
        start, stop: the bytes of unpacked text it stands for; for parquet its rows.
        data: its records; None for who parses to read them.
        file_bytes: how far this piece moves us through the file as it lies on disk.
    """

    file_number: int
    number: int
    source: SourceFile
    start: int
    stop: int
    data: bytes | None
    file_bytes: int


def pieces(
    files: Sequence[SourceFile],
    piece_bytes: int,
    *,
    spec: ReadSpec,
    start: tuple[int, int] = (0, 0),
    streams_ahead: int = 4,
) -> Generator[Piece, None, None]:
    """All pieces of all files, in order.

    Closing the generator, or dropping it, ends its threads.

    Args:
        files: what to read.
        piece_bytes: about how much text a piece holds.
        spec: how records are taken.
        start: (file number, piece number) of the first piece wanted. A stream is then read from its beginning.
        streams_ahead: how many streams are unpacked at the same time.

    Raises:
        BadInputError: packed data or parquet is damaged; raised where its next piece would have come.
        UsageError: a file cannot be read, or does not hold what the spec asks for.
    """
    assert piece_bytes > 0, "a piece holds at least one byte"
    wanted = range(start[0], len(files))
    for number in wanted:
        _check_keys(files[number], spec)
    waiting = deque(number for number in wanted if files[number].streamed)
    ahead: dict[int, BackgroundIterator[Part]] = {}
    try:
        for number in wanted:
            while waiting and len(ahead) < streams_ahead:
                nearest = waiting.popleft()
                ahead[nearest] = _read_ahead(files[nearest], piece_bytes, spec)
            first = start[1] if number == start[0] else 0
            if not files[number].streamed:
                yield from _planned(number, files[number], piece_bytes, spec=spec, first=first)
                continue
            for place, part in enumerate(ahead[number]):
                if place >= first:
                    yield Piece(number, place, files[number], *part)
            ahead.pop(number).close()
    finally:
        for stream in ahead.values():
            stream.close()


def read_piece(piece: Piece, spec: ReadSpec) -> bytes:
    """The bytes of the piece's records.

    Raises:
        UsageError: the file cannot be read.
    """
    if piece.data is not None:
        return piece.data
    try:
        descriptor = os.open(piece.source.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_plain(_PlainText(descriptor), piece, spec)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise explain_os_error(error, "reading the input") from error


def piece_digest(data: bytes) -> bytes:
    """The hash of one piece; a file's is that of its pieces' hashes one after another."""
    return blake3(data).digest()


def _check_keys(file: SourceFile, spec: ReadSpec) -> None:
    if file.format == "text" and len(spec.json_keys) != 1:
        raise UsageError(
            f"{file.path} is plain text, which has one text a document",
            found=f"{len(spec.json_keys)} keys: {', '.join(spec.json_keys)}",
            fix="preprocess plain text apart, with one key",
        )


def _read_ahead(file: SourceFile, piece_bytes: int, spec: ReadSpec) -> BackgroundIterator[Part]:
    def compute(stopped: Callable[[], bool]) -> Iterator[Part]:
        if file.format != "parquet":
            return stream_parts(file, piece_bytes, spec=spec, stopped=stopped)
        from mdata.sources.parquet import parquet_parts

        return parquet_parts(file, piece_bytes, spec=spec)

    return BackgroundIterator(
        compute, limit=_PIECES_AHEAD * piece_bytes, weight=lambda part: len(part.data), name="mdata-read-ahead"
    )


def _planned(file_number: int, file: SourceFile, piece_bytes: int, *, spec: ReadSpec, first: int) -> Iterator[Piece]:
    """The pieces of a plain file, without reading it."""
    whole = file.format == "text" and spec.text_documents == "file"
    step = max(file.size_bytes, 1) if whole else piece_bytes
    last = 1 if whole else -(-file.size_bytes // step)
    for number in range(first, last):
        start, stop = number * step, min((number + 1) * step, file.size_bytes)
        yield Piece(file_number, number, file, start, stop, None, stop - start)


def _read_plain(text: _PlainText, piece: Piece, spec: ReadSpec) -> bytes:
    if piece.source.format != "text":
        first, last = piece_span(text, piece.start, stop=piece.stop, rule=LINES, longest=spec.max_record_bytes)
        data = text.read(first, last - first)
        at_end = last == piece.source.size_bytes
        return without_blank_end(data, spec.max_record_bytes) if at_end else data
    if spec.text_documents == "file":
        return without_mark(text.read(0, spec.max_record_bytes + OVERHANG))
    first, last = piece_span(text, piece.start, stop=piece.stop, rule=PARAGRAPHS, longest=spec.max_record_bytes)
    data = text.read(first, last - first)
    return without_mark(data) if piece.start == 0 else data


class _PlainText:
    """A file that lies open, as text."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, place: int, size: int) -> bytes:
        """The bytes [place, place + size); fewer at the end of the file only."""
        data = os.pread(self._descriptor, size, place)
        while 0 < len(data) < size and (more := os.pread(self._descriptor, size - len(data), place + len(data))):
            data += more
        return data
