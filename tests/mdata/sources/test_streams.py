"""Memory for decompression: allowed up to the documented size; beyond it the error names the size, never damage."""

from __future__ import annotations

import lzma

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import BadInputError
from mdata.sources import streams
from tests.helpers.examples import examples
from tests.mdata.sources.inputs import find_files, texts

LINE = b'{"text": "a"}\n'


def long_zstd(data: bytes, window_log: int) -> bytes:
    """As `zstd --long=N` writes a stream whose size it does not know."""
    settings = zstandard.ZstdCompressionParameters(window_log=window_log, enable_ldm=True, write_checksum=True)
    stream = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    return stream.compress(data) + stream.flush()


@pytest.mark.parametrize("window_log", [10, 27, 28, 31])
def test_long_windows_are_read(tmp_path, window_log):
    (tmp_path / "x.jsonl.zst").write_bytes(long_zstd(LINE * 100, window_log))
    (file,) = find_files([tmp_path / "x.jsonl.zst"])
    assert texts(file)[0] == ["a"] * 100


FAR = {
    "window": (b"\x04" + bytes([22 << 3]), 1 << 32),
    "eighths": (b"\x04" + bytes([21 << 3 | 3]), (1 << 31) + 3 * (1 << 28)),
    "segment": (b"\xe4" + (1 << 40).to_bytes(8, "little"), 1 << 40),
    "dictionary": (b"\xe7" + bytes(4) + (3 << 40).to_bytes(8, "little"), 3 << 40),
}


@pytest.mark.parametrize("name", FAR)
def test_a_window_that_is_too_large_is_named(tmp_path, name):
    header, window = FAR[name]
    frame = b"\x28\xb5\x2f\xfd" + header + b"\1\0\0"
    (tmp_path / "x.jsonl.zst").write_bytes(long_zstd(LINE, 20) + frame)
    (file,) = find_files([tmp_path / "x.jsonl.zst"])
    with pytest.raises(BadInputError) as caught:
        texts(file)
    said = str(caught.value)
    assert f"{window:,}" in said and "2,147,483,648" in said and "smaller window" in said and "damaged" not in said


@pytest.mark.parametrize("size", [1, 5, 17])
def test_a_header_that_comes_in_parts_is_read_whole(size):
    """The window is looked for where the header is complete, however little the first part holds."""
    header, window = FAR["dictionary"]
    frame = b"\x28\xb5\x2f\xfd" + header + b"\1\0\0"
    parts = [frame[at : at + size] for at in range(0, len(frame), size)]
    with pytest.raises(streams.TooLargeError, match=f"a window of {window:,} bytes"):
        list(streams.decompress(iter(parts), "zstd"))


@examples(200)
@given(st.binary(min_size=1, max_size=14))
def test_windows_are_those_that_the_library_tells(header):
    frame = (b"\x28\xb5\x2f\xfd" + header).ljust(18, b"\0")
    try:
        told = zstandard.get_frame_parameters(frame).window_size
    except zstandard.ZstdError:
        return
    assert streams._window(frame) == told


def test_an_xz_file_that_needs_too_much_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "_XZ_MEMORY_BYTES", 1 << 20)
    (tmp_path / "x.jsonl.xz").write_bytes(lzma.compress(LINE))
    (file,) = find_files([tmp_path / "x.jsonl.xz"])
    with pytest.raises(BadInputError, match=r"takes too much memory[\s\S]*more than the limit of 1,048,576 bytes"):
        texts(file)
    monkeypatch.undo()
    assert texts(file)[0] == ["a"]
    (tmp_path / "x.jsonl.xz").write_bytes(lzma.compress(LINE)[:-9])
    with pytest.raises(BadInputError, match="damaged"):
        texts(file)
