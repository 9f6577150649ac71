"""Packed bytes to text, member by member and frame by frame, in bounded memory.

gzip, zstd, bzip2 and xz, each possibly of several members; zero padding between and after gzip members and xz
streams is legal, and so are zstd's skippable frames. Anything else after the end, a missing end and a wrong
checksum are damage. No step gives more than a few megabytes of text, whatever a hostile file promises.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from mdata.sources.input_files import Compression

if TYPE_CHECKING:
    import zstandard

READ_BYTES = 1 << 17
_STEP_BYTES = 1 << 18
# One step of zstandard gives all that its input holds: at worst a block of 128 KiB from each 4 bytes.
_ZSTD_STEP_BYTES = 1 << 11
_ZSTD_SMALL_STEP_BYTES = 1 << 8
_ZSTD_TEXT_BYTES = 1 << 15
# What the largest preset of xz needs is 65 MiB.
_XZ_MEMORY_BYTES = 1 << 28
# The largest window of `zstd --long=31`; it is held in memory as far as the text fills it.
_ZSTD_WINDOW_BYTES = 1 << 31
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_HEADER_BYTES = 18  # at most

# Takes packed bytes and a source of more; gives text, and returns the bytes after the member's end.
Member = Callable[[bytes, Callable[[], bytes]], Generator[bytes, None, bytes]]


class DamagedError(Exception):
    """The packed data is damaged; the message says how."""


class TooLargeError(Exception):
    """Sound data, as far as one can see, that takes more memory to unpack than we give; the message says how much."""


def unpack(chunks: Iterator[bytes], compression: Compression) -> Iterator[bytes]:
    """The text that packed chunks hold, in chunks.

    Raises:
        DamagedError: the data is not whole. TooLargeError: it asks for too much memory.
    """
    if compression == "none":
        yield from chunks
        return
    import zstandard

    try:
        yield from _members(chunks, compression)
    except (zlib.error, lzma.LZMAError, zstandard.ZstdError, EOFError) as error:
        raise DamagedError(str(error)) from error
    except OSError as error:
        # bzip2's own complaint is an OSError without a number.
        if error.errno is not None:
            raise
        raise DamagedError(str(error)) from error


def _members(chunks: Iterator[bytes], compression: Compression) -> Iterator[bytes]:
    member: Member = {"gzip": _gzip, "zstd": _zstd, "bzip2": _bzip2, "xz": _xz}[compression]
    padding = b"\0" if compression in ("gzip", "xz") else b""

    def more() -> bytes:
        data = next(chunks, b"")
        if not data:
            raise DamagedError(f"it ends in the middle of {compression} data")
        return data

    rest = next(chunks, b"")
    while rest:
        rest = yield from member(rest, more)
        rest = rest or next(chunks, b"")
        while padding and rest and not (rest := rest.lstrip(padding)):
            rest = next(chunks, b"")


def _gzip(data: bytes, more: Callable[[], bytes]) -> Generator[bytes, None, bytes]:
    # zlib itself reads header and checks: half as long as gzip.GzipFile takes.
    unpacker = zlib.decompressobj(wbits=31)
    while not unpacker.eof:
        yield unpacker.decompress(data or more(), _STEP_BYTES)
        data = unpacker.unconsumed_tail
    return unpacker.unused_data


def _zstd(data: bytes, more: Callable[[], bytes]) -> Generator[bytes, None, bytes]:
    import zstandard

    data = _with_header(data, more)
    window = _window(data)
    if window > _ZSTD_WINDOW_BYTES:
        raise TooLargeError(
            f"a window of {window:,} bytes; at most {_ZSTD_WINDOW_BYTES:,} are given (zstd --ultra --long=31)"
        )
    frames = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    unpacker: zstandard.ZstdDecompressionObj = frames.decompressobj(_ZSTD_TEXT_BYTES)
    step, place = _ZSTD_STEP_BYTES, 0
    while True:
        if place >= len(data):
            data, place = more(), 0
        text = unpacker.decompress(data[place : place + step])
        place += step
        yield text
        if unpacker.eof:
            return unpacker.unused_data + data[place:]
        step = _ZSTD_SMALL_STEP_BYTES if len(text) > _STEP_BYTES else _ZSTD_STEP_BYTES


def _with_header(data: bytes, more: Callable[[], bytes]) -> bytes:
    """So much of a frame that all of its header is there; the frame may be shorter, but for its header."""
    try:
        while len(data) < _ZSTD_HEADER_BYTES:
            data += more()
    except DamagedError:
        pass  # where there is no more, whoever unpacks it says so
    return data


def _window(data: bytes) -> int:
    """The window that a frame asks for, in bytes (RFC 8878, 3.1.1.1); 0 where no frame begins.

    The library tells it of windows alone that it can have.
    """
    if len(data) < 6 or data[:4] != _ZSTD_MAGIC:
        return 0
    flags = data[4]
    if not flags & 0x20:
        smallest = 1 << (10 + (data[5] >> 3))
        return smallest + smallest // 8 * (data[5] & 7)
    # A single segment: the window is the content, whose size stands behind the number of a dictionary.
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
        raise TooLargeError(
            f"more than {_XZ_MEMORY_BYTES:,} bytes, the most that is given (xz -9 takes 68 MB)"
        ) from error


def _buffered(
    unpacker: bz2.BZ2Decompressor | lzma.LZMADecompressor, data: bytes, more: Callable[[], bytes]
) -> Generator[bytes, None, bytes]:
    """A member whose unpacker keeps the input that it has not used yet."""
    while not unpacker.eof:
        given = (data or more()) if unpacker.needs_input else b""
        data = b"" if given else data
        yield unpacker.decompress(given, _STEP_BYTES)
    return unpacker.unused_data
