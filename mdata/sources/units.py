"""Cutting files into pieces of bounded size that hold whole lines.

A line ends at LF, CR LF or a lone CR, as in Python's text files. A plain file is planned as byte ranges
without reading it; a range then stands for the lines that *begin* in it, so neighbouring ranges agree on
every line wherever the cut falls, also inside a CR LF. A compressed file cannot be entered in the middle:
it is one unit, whose text comes out in blocks.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from mdata.errors import BadInputError, explain_os_error
from mdata.sources.files import SourceFile

_SCAN_BYTES = 1 << 16


@dataclass(frozen=True)
class Unit:
    """The lines of a plain file that begin in [start, stop), or the whole of a compressed one."""

    file: SourceFile
    start: int
    stop: int


def plan_units(files: Sequence[SourceFile], unit_bytes: int) -> list[Unit]:
    """Units of at most `unit_bytes` that cover every file once, in order."""
    assert unit_bytes > 0, "a unit holds at least one byte"
    units = []
    for file in files:
        step = unit_bytes if file.compression == "none" else max(file.size_bytes, 1)
        starts = range(0, file.size_bytes, step)
        units += [Unit(file, start, min(start + step, file.size_bytes)) for start in starts]
    return units


@dataclass(frozen=True)
class Block:
    """Whole lines, and how many bytes of the file they came from (for progress only)."""

    data: bytes
    file_bytes: int


def blocks(unit: Unit, unit_bytes: int) -> Iterator[Block]:
    """The text of a unit as blocks of whole lines: one for a plain range, many for a compressed file.

    Raises:
        BadInputError: the compressed data is damaged.
        UsageError: the file cannot be read.
    """
    if unit.file.compression == "none":
        yield Block(read_range(unit), unit.stop - unit.start)
    else:
        yield from _gzip_blocks(unit.file, unit_bytes)


def read_range(unit: Unit) -> bytes:
    """The lines of a plain file that begin in the unit's range.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        with unit.file.path.open("rb") as file:
            first = line_start_from(file, unit.start)
            last = line_start_from(file, unit.stop)
            file.seek(first)
            return file.read(last - first)
    except OSError as error:
        raise explain_os_error(error, "reading the input") from error


def line_start_from(file: BinaryIO, position: int) -> int:
    """The first place >= position where a line begins, or the end of the file."""
    if position == 0:
        return 0
    place = position - 1
    while True:
        file.seek(place)
        data = file.read(_SCAN_BYTES)
        if not data:
            return place
        end = _first_line_end(data)
        if end is None:
            place += len(data)
        elif data[end : end + 1] == b"\r":
            file.seek(place + end + 1)
            return place + end + (2 if file.read(1) == b"\n" else 1)
        else:
            return place + end + 1


def _first_line_end(data: bytes) -> int | None:
    ends = [place for place in (data.find(b"\n"), data.find(b"\r")) if place >= 0]
    return min(ends) if ends else None


def _gzip_blocks(file: SourceFile, block_bytes: int) -> Iterator[Block]:
    done = told = 0
    kept = bytearray()
    try:
        with file.path.open("rb") as packed, gzip.GzipFile(fileobj=packed) as stream:
            while data := stream.read(block_bytes):
                done += len(data)
                kept += data
                # What was kept before holds no line end, but for a CR at its very end.
                whole = _whole_lines(kept, since=len(kept) - len(data) - 1)
                if whole:
                    yield Block(bytes(kept[:whole]), packed.tell() - told)
                    told = packed.tell()
                    del kept[:whole]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInputError(
            f"{file.path}: the gzip data is damaged after {done} bytes of text",
            found=str(error),
            fix="fetch or compress the file again",
        ) from error
    except OSError as error:
        raise explain_os_error(error, "reading the input") from error
    yield Block(bytes(kept), file.size_bytes - told)


def _whole_lines(data: bytearray, *, since: int) -> int:
    """How many bytes at the start are lines that surely end; a CR at the very end may be half of a CR LF."""
    since = max(since, 0)
    return max(data.rfind(b"\n", since), data.rfind(b"\r", since, len(data) - 1)) + 1
