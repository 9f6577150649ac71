"""Unfinished files: hidden until renamed, continued from a journal's sync point; only the same file is accepted."""

from __future__ import annotations

import errno
import itertools
import os

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import DamageError, ResourceError, UsageError
from mdata.indexed import append_file, writer
from mdata.indexed.append_file import AppendFile, SyncPoint, raw_bytes
from mdata.indexed.writer import BlockHasher
from mdata.util import atomic_io
from tests.helpers.examples import examples
from tests.helpers.failures import durable_calls

BYTES = st.binary(max_size=30)
EVENTS = st.lists(st.one_of(BYTES, st.sampled_from(["sync", "killed", "placed", "rest"])), max_size=20)


@examples(100)
@given(events=EVENTS)
def test_a_list_of_bytes_comes_back_whatever_was_cut(tmp_path_factory, events):
    """After "killed" a new writer keeps what was synced last; "placed": it was placed, and put back by its writer;
    "rest": it is closed until it is used again."""
    path = tmp_path_factory.mktemp("s") / "x"
    written, synced, kept = b"", b"", None
    file = AppendFile(path)
    for event in events:
        if isinstance(event, bytes):
            file.append(event)
            written += event
        elif event == "sync":
            kept, synced = file.sync(), written
            assert kept.size == len(synced)
        elif event == "rest":
            file.rest()
        elif event == "placed":
            file.commit()
            assert file.committed and path.read_bytes() == written
            file.roll_back()
        else:
            file.close()
            file, written = AppendFile(path, kept), synced
        assert not path.exists() and not file.committed
        assert file.size == len(written) and file.read(0, 1000) == written
        assert file.partial.read_bytes() == written
    file.commit()
    assert path.read_bytes() == written and not file.partial.exists()
    file.roll_back()
    assert file.partial.read_bytes() == written and not path.exists()
    file.roll_back()
    file.discard()
    assert list(path.parent.iterdir()) == []


def test_a_file_that_was_replaced_while_it_was_closed_is_refused(tmp_path):
    file = AppendFile(tmp_path / "x")
    file.append(b"begun")
    file.rest()
    other = tmp_path / "other"
    other.write_bytes(b"other")
    other.replace(file.partial)
    with pytest.raises(DamageError, match="was removed while it was being written"):
        file.append(b"more")
    assert file.partial.read_bytes() == b"other"


@examples(50)
@given(values=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40), at_once=st.integers(1, 50))
def test_arrays_come_back_in_blocks(tmp_path_factory, values, at_once):
    array = np.array(values, "<i4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(append_file, "_ENTRIES_AT_ONCE", at_once)
        file = AppendFile(tmp_path_factory.mktemp("s") / "x")
        for part in np.array_split(array, 3):
            file.append(part)
        blocks = list(file.blocks(array.dtype))
        file.discard()
    assert [len(block) for block in blocks[:-1]] == [at_once] * (len(blocks) - 1)
    assert np.concatenate([np.empty(0, "<i4"), *blocks]).tolist() == values
    assert bytes(raw_bytes(array)) == array.tobytes()


def test_less_than_was_kept_is_damage_and_nothing_is_cut(tmp_path):
    file = AppendFile(tmp_path / "x")
    file.append(b"12345")
    file.close()
    with pytest.raises(DamageError, match=r"shorter than it was(.|\n)*5 bytes(.|\n)*6 or more"):
        AppendFile(tmp_path / "x", SyncPoint(6, ""))
    assert (tmp_path / ".x.partial").read_bytes() == b"12345"
    with pytest.raises(DamageError, match="0 bytes"):
        AppendFile(tmp_path / "nothing", SyncPoint(1, ""))


@pytest.mark.parametrize("size", [1, 1000, 1 << 17])
def test_what_ends_in_another_way_is_not_continued(tmp_path, size):
    file = AppendFile(tmp_path / "x")
    file.append(bytes(size))
    kept = file.sync()
    file.close()
    for other in (b"\1" * size, bytes(size - 1) + b"\1", b"\1" * (size + 9)):
        (tmp_path / ".x.partial").write_bytes(other)
        with pytest.raises(DamageError, match=r"\.x\.partial is not what was written"):
            AppendFile(tmp_path / "x", kept)
    (tmp_path / ".x.partial").write_bytes(bytes(size) + b"more")
    again = AppendFile(tmp_path / "x", kept)
    assert again.read(0, size + 9) == bytes(size)
    again.discard()


def test_a_result_is_never_taken_for_the_file_in_the_making(tmp_path):
    """Neither by who continues, nor by who places or puts back: its file was lost, and an older result is there."""
    file = AppendFile(tmp_path / "x")
    file.append(b"12345")
    kept = file.sync()
    (tmp_path / "x").write_bytes(b"12345")
    file.partial.unlink()
    with pytest.raises(DamageError, match="was removed while it was being written"):
        file.commit()
    file.roll_back()
    (tmp_path / "other").write_bytes(b"67890")
    (tmp_path / "other").rename(file.partial)
    with pytest.raises(DamageError, match="was removed while it was being written"):
        file.commit()
    file.discard()
    assert file.partial.read_bytes() == b"67890"
    with pytest.raises(DamageError, match="is not what was written"):
        AppendFile(tmp_path / "x", kept)
    assert (tmp_path / "x").read_bytes() == b"12345"


def test_an_older_result_is_left_until_ours_is_placed(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    file = AppendFile(tmp_path / "x")
    file.append(b"new")
    file.roll_back()  # ours was not placed: the other one is not ours to take
    assert (tmp_path / "x").read_bytes() == b"old"
    file.discard()
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_second_writer_is_refused(tmp_path):
    file = AppendFile(tmp_path / "x")
    file.append(b"1")
    with pytest.raises(UsageError, match="another process is writing"):
        AppendFile(tmp_path / "x")
    assert file.read(0, 9) == b"1"
    file.discard()


@pytest.mark.parametrize("ended", ["commit", "close", "rest"])
def test_discard_leaves_the_file_of_another_writer(tmp_path, ended):
    """Whose name was free again: this file had been placed, or closed and taken over."""
    file = AppendFile(tmp_path / "x")
    file.append(b"mine")
    getattr(file, ended)()
    if ended == "commit":
        (tmp_path / "x").unlink()
    else:
        file.partial.unlink()
    other = AppendFile(tmp_path / "x")
    other.append(b"theirs")
    file.discard()
    other.commit()
    assert (tmp_path / "x").read_bytes() == b"theirs"


def test_a_short_read_is_continued(tmp_path, monkeypatch):
    file = AppendFile(tmp_path / "x")
    file.append(b"1234567")
    real = os.pread
    monkeypatch.setattr(append_file.os, "pread", lambda fd, count, offset: real(fd, min(count, 2), offset))
    assert (file.read(0, 99), file.read(1, 5), file.read(7, 1)) == (b"1234567", b"23456", b"")
    assert [array.tolist() for array in file.blocks(np.dtype("u1"))] == [[49, 50, 51, 52, 53, 54, 55]]


def test_a_file_that_was_cut_while_it_was_written_is_damage(tmp_path):
    file = AppendFile(tmp_path / "x")
    file.append(bytes(16))
    os.truncate(file.partial, 9)
    with pytest.raises(DamageError, match=r"\.x\.partial was cut while it was being written"):
        list(file.blocks(np.dtype("<i8")))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_failures_are_named(tmp_path, monkeypatch, code):
    for number, name in enumerate(("writing", "writing", "finishing")):
        file = AppendFile(tmp_path / "x")
        with (
            durable_calls(monkeypatch, number, code=code),
            pytest.raises(ResourceError, match=rf"{name} .*x"),
        ):
            file.append(b"1")
            file.sync()
            file.commit()
        file.discard()
    assert list(tmp_path.iterdir()) == []


def test_a_short_write_is_continued(tmp_path, monkeypatch):
    real = atomic_io.write
    monkeypatch.setattr(atomic_io, "write", lambda fd, data: real(fd, data[:2]))
    file = AppendFile(tmp_path / "x")
    file.append(b"1234567")
    assert (file.read(0, 99), file.size) == (b"1234567", 7)
    file.discard()


@examples(100)
@given(data=st.binary(max_size=60), cuts=st.lists(st.integers(0, 60), max_size=6), kept=st.integers(0, 60))
def test_block_hashes_are_those_of_the_blocks_also_after_a_cut(tmp_path_factory, data, cuts, kept):
    """Blocks of 7 bytes; written in pieces, cut back to `kept` bytes, and written on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "BLOCK_BYTES", 7)
        path, kept = tmp_path_factory.mktemp("h") / "x", min(kept, len(data))
        file = AppendFile(path)
        first = BlockHasher(file)
        feed(first, data, cuts)
        first.flush()
        file.close()
        whole = path.with_name(".x.partial").read_bytes()[: kept // 7 * 32]
        file = AppendFile(path, SyncPoint(len(whole), blake3.blake3(whole).hexdigest(length=16)))
        hasher = BlockHasher(file, data[kept - kept % 7 : kept])
        feed(hasher, data[kept:], cuts)
        found = hasher.finish()
        file.discard()
    assert found == tuple(blake3.blake3(data[at : at + 7]).digest() for at in range(0, len(data), 7))


def feed(hasher, data, cuts):
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    for start, stop in itertools.pairwise(places):
        hasher.update(memoryview(data)[start:stop])


def test_writing_to_the_device_begins_before_the_sync(tmp_path, monkeypatch):
    """Every byte once, but for the last, which `sync` waits for anyway."""
    begun = []
    real = atomic_io.sync_soon
    monkeypatch.setattr(append_file, "_SYNC_SOON_BYTES", 10)

    def noted(fd, start, *, count):
        real(fd, start, count=count)
        begun.append((start, count))

    monkeypatch.setattr(atomic_io, "sync_soon", noted)
    file = AppendFile(tmp_path / "x")
    for data in (b"123456", b"7890ab", b"c", b"0123456789", b"last"):
        file.append(data)
    assert begun == [(0, 12), (12, 11)]
    kept = file.sync()
    file.close()
    AppendFile(tmp_path / "x", kept).append(b"0123456789")
    assert begun[2:] == [(27, 10)]
