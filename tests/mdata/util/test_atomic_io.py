"""Files are complete or absent."""

from __future__ import annotations

import errno
import multiprocessing
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError
from mdata.util import atomic_io
from tests.helpers.examples import examples
from tests.helpers.failures import crash_at, durable_calls

FORK = multiprocessing.get_context("fork")


@examples(60)
@given(data=st.binary(max_size=50), taken=st.lists(st.integers(1, 9), min_size=1))
def test_every_byte_is_written_however_few_are_taken_at_once(tmp_path_factory, data, taken):
    path, real, sizes = tmp_path_factory.mktemp("d") / "x", atomic_io.write, iter(taken * 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic_io, "write", lambda fd, rest: real(fd, rest[: next(sizes)]))
        atomic_io.atomic_write(path, data)
    assert path.read_bytes() == data and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("old", [None, b"old content"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_file_has_its_old_content_or_the_new_one(tmp_path, monkeypatch, old, code):
    path = tmp_path / "x"
    with durable_calls(monkeypatch) as calls:
        atomic_io.atomic_write(path, b"new")
    assert [call[0] for call in calls.seen] == ["write", "sync", "rename", "sync"]
    for number in range(len(calls.seen)):
        path.unlink(missing_ok=True)
        if old is not None:
            path.write_bytes(old)
        with durable_calls(monkeypatch, number, code=code), pytest.raises(OSError, match=r".") as caught:
            atomic_io.atomic_write(path, b"new")
        assert caught.value.errno == code and "x" in str(caught.value.filename)
        renamed = number == len(calls.seen) - 1
        expected = b"new" if renamed else old
        assert (path.read_bytes() if path.exists() else None) == expected
        assert [p.name for p in tmp_path.iterdir()] == (["x"] if expected is not None else [])


@pytest.mark.parametrize("old", [None, b"old content"])
def test_a_crash_at_any_call_leaves_one_of_the_two(tmp_path, old):
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "x"
        if old is not None:
            path.write_bytes(old)
        crashed = crash_at(number, lambda path=path: atomic_io.atomic_write(path, b"new"))
        found = path.read_bytes() if path.exists() else None
        assert found in (old, b"new") if crashed else found == b"new"
        if not crashed:
            break
        atomic_io.atomic_write(path, b"newer")
        assert path.read_bytes() == b"newer" and list(folder.iterdir()) == [path]
    assert number == 4


def test_a_partial_file_is_hidden_and_beside_its_final_name(tmp_path):
    assert atomic_io.partial_path(tmp_path / "a.b.bin") == tmp_path / ".a.b.bin.partial"


def test_a_folder_may_be_renamed_by_whoever_waits_for_the_file(tmp_path, monkeypatch):
    """As rank 0 does with a checkpoint, once the last rank's file is there."""
    real, folder = atomic_io.rename, tmp_path / "making"

    def rename(source, target):
        real(source, target)
        folder.rename(tmp_path / "made")

    monkeypatch.setattr(atomic_io, "rename", rename)
    for write in (lambda path: atomic_io.atomic_write(path, b"x"), lambda path: atomic_io.atomic_writes({path: b"x"})):
        folder.mkdir()
        write(folder / "last")
        (last,) = (tmp_path / "made").iterdir()
        assert last.read_bytes() == b"x"
        last.unlink()
        last.parent.rmdir()


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_pipe_is_not_replaced_by_a_file(tmp_path, is_linked):
    pipe, name = tmp_path / "pipe", tmp_path / "name"
    os.mkfifo(pipe)
    name = name if is_linked else pipe
    if is_linked:
        name.symlink_to(pipe)
    with pytest.raises(UsageError, match=f"{name} is not a regular file and is not replaced"):
        atomic_io.atomic_write(name, b"text")
    assert pipe.is_fifo() and name.exists()
    assert sorted(tmp_path.iterdir()) == sorted({pipe, name}), "no partial file is left"
