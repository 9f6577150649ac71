"""Blocks come in order and complete, with any number of threads and short reads; errors name their block."""

from __future__ import annotations

import random

import pytest

from mdata.indexed import blocks
from mdata.indexed.blocks import BlockFile


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 8)


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 400, 403])
def test_the_blocks_are_the_file(tmp_path, monkeypatch, small_blocks, size, threads):
    data = random.Random(size).randbytes(size)
    (tmp_path / "x").write_bytes(data)
    real = blocks.os.preadv
    monkeypatch.setattr(blocks.os, "preadv", lambda fd, views, at: real(fd, [views[0][:3]], at))
    with BlockFile(tmp_path / "x", size) as file:
        found = list(file.each(lambda number: bytes(file.read(number)), threads=threads))
    assert found == [data[at : at + 8] for at in range(0, size, 8)]


def test_a_file_that_is_shorter_gives_what_is_there(tmp_path, small_blocks):
    (tmp_path / "x").write_bytes(b"0123456789")
    with BlockFile(tmp_path / "x", 20) as file:
        assert list(file.each(lambda number: bytes(file.read(number)))) == [b"01234567", b"89", b""]


def test_an_error_of_one_block_ends_the_rest(tmp_path, small_blocks):
    (tmp_path / "x").write_bytes(bytes(4000))
    seen = []

    def look(number: int) -> int:
        seen.append(number)
        if number == 3:
            raise OSError(5, "broken")
        return number

    with BlockFile(tmp_path / "x", 4000) as file, pytest.raises(OSError, match="broken"):
        for number in file.each(look, threads=2):
            assert number < 3
    assert len(seen) < 100
