"""Decompression of gzip, zstd, bzip2 and xz, member by member, in bounded memory.

A file may have several members; zero padding between and after gzip members and xz streams is legal, and so are zstd's
skippable frames. Anything else after the end, a missing end and a wrong checksum are damage. No step returns more than
a few megabytes of text, whatever a malicious file declares.
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
        given = (data or more()) if decompressor.needs_input else b""
        data = b"" if given else data
        yield decompressor.decompress(given, _STEP_BYTES)
    return decompressor.unused_data
