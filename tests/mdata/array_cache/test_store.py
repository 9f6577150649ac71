"""Cached arrays: an opened array is the one that was built, whatever happened to the files."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import multiprocessing
import os
import pickle
import time

import numpy as np
import pytest
from blake3 import blake3

from mdata import ResourceError
from mdata.array_cache import store
from mdata.array_cache.store import FACTS, cached, entry_path, find
from mdata.util import file_lock
from tests.helpers.failures import crash_at, durable_calls
from tests.helpers.notes import Notes

FORK = multiprocessing.get_context("fork")
KEY = {"name": "numbers", "corpus": "abc", "length": 7}


def make():
    return [{"small": np.arange(7, dtype=np.int32).reshape(7, 1), "empty": np.zeros((0, 2), np.uint32)}]


def never():
    raise AssertionError("built again")


def check(found):
    for name, array in make()[0].items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape
        assert found[name].tolist() == array.tolist()


def test_they_are_built_once_and_can_be_read_by_numpy(tmp_path):
    check(cached(tmp_path / "cache", KEY, make=make))
    check(cached(tmp_path / "cache", KEY, make=never))
    check({name: np.load(entry_path(tmp_path / "cache", KEY) / f"{name}.npy") for name in make()[0]})


def test_parts_stand_one_behind_the_other(tmp_path):
    def parts():
        for first in range(0, 7, 2):
            rows = np.arange(first, min(first + 2, 7), dtype=np.int32).reshape(-1, 1)
            yield {"small": rows, "empty": np.zeros((0, 2), np.uint32)}

    check(cached(tmp_path, KEY, make=parts))
    whole = cached(tmp_path / "whole", KEY, make=make)
    for name in whole:
        path = entry_path(tmp_path, KEY) / f"{name}.npy"
        assert path.read_bytes() == (entry_path(tmp_path / "whole", KEY) / path.name).read_bytes()


def test_what_is_found_cannot_be_changed(tmp_path):
    assert find(tmp_path / "none", KEY) is None and not (tmp_path / "none").exists()
    cached(tmp_path, KEY, make=make)
    for mapped in (True, False):
        found = find(tmp_path, KEY, mapped=mapped)
        check(found)
        with pytest.raises(ValueError, match="read-only"):
            found["small"][0] = 1


def test_another_key_is_another_entry(tmp_path):
    cached(tmp_path, KEY, make=make)
    for change in ({"corpus": "abd"}, {"length": 8}, {"name": "others"}):
        assert cached(tmp_path, {**KEY, **change}, make=lambda: [{"one": np.ones(1)}]).keys() == {"one"}
    check(cached(tmp_path, KEY, make=never))


@pytest.mark.parametrize("file", ["small.npy", "empty.npy", FACTS])
def test_every_changed_or_missing_byte_is_noticed(tmp_path, file):
    cached(tmp_path, KEY, make=make)
    path = entry_path(tmp_path, KEY) / file
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 16]) + good[place + 1 :])
        heard = Notes()
        check(cached(tmp_path, KEY, make=make, progress=heard))
        assert heard.lines and all("is built again" in note for note in heard.lines)
    for damage in (path.unlink, lambda: path.write_bytes(good[:-1]), lambda: path.write_bytes(b"")):
        damage()
        check(cached(tmp_path, KEY, make=make))
    assert path.read_bytes() == good


@pytest.mark.parametrize(
    "text", [b"[" * 30_000, b"9" * 5000, b"\xff", b"[]", b"1", b"{}", b'{"format": [], "version": {}, "key": 1}']
)
def test_facts_that_are_none_are_built_again(tmp_path, text):
    cached(tmp_path, KEY, make=make)
    (entry_path(tmp_path, KEY) / FACTS).write_bytes(text)
    heard = Notes()
    check(cached(tmp_path, KEY, make=make, progress=heard))
    assert any("is built again" in note for note in heard.lines)


def saved(write):
    file = io.BytesIO()
    write(file)
    return file.getvalue()


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        saved(lambda file: np.savez(file, small=np.arange(7))),
        saved(lambda file: np.save(file, np.array([None, "x"], object), allow_pickle=True)),
        saved(lambda file: np.save(file, np.ones((3, 2), order="F"))),
        saved(lambda file: np.save(file, np.arange(7)))[:-1],
        pickle.dumps([1, 2]),
    ],
    ids=["empty", "cut in its header", "several arrays", "objects", "by columns", "cut", "no array"],
)
def test_a_file_that_is_no_array_is_built_again_though_its_facts_agree(tmp_path, content, mapped):
    cached(tmp_path, KEY, make=make)
    entry = entry_path(tmp_path, KEY)
    (entry / "small.npy").write_bytes(content)
    facts = json.loads((entry / FACTS).read_text())
    facts["files"]["small"] = {"bytes": len(content), "hash": blake3(content).hexdigest()}
    (entry / FACTS).write_text(json.dumps(facts))
    heard = Notes()
    check(cached(tmp_path, KEY, make=make, progress=heard, mapped=mapped))
    assert heard.lines and "is built again" in heard.lines[0]
    check(cached(tmp_path, KEY, make=never, mapped=mapped))


def test_no_failure_leaves_half_an_entry(tmp_path, monkeypatch):
    with durable_calls(monkeypatch) as calls:
        cached(tmp_path / "whole", KEY, make=make)
    assert len(calls.seen) > 10
    for number in range(len(calls.seen)):
        folder = tmp_path / str(number)
        with durable_calls(monkeypatch, number), pytest.raises(ResourceError, match="No space left"):
            cached(folder, KEY, make=make)
        whole = [entry_path(folder, KEY)] if entry_path(folder, KEY).is_dir() else []
        assert list(folder.iterdir()) == whole
        check(cached(folder, KEY, make=make))
        assert list(folder.iterdir()) == [entry_path(folder, KEY)]


def test_no_death_leaves_half_an_entry(tmp_path):
    number = 0
    while crash_at(number, lambda folder=tmp_path / f"c{number}": cached(folder, KEY, make=make), removals=True):
        folder = tmp_path / f"c{number}"
        check(cached(folder, KEY, make=make))
        assert [path.name for path in folder.iterdir()] == [entry_path(folder, KEY).name]
        number += 1
    assert number > 10


def build_slowly(folder, built):
    def slowly():
        built.put(os.getpid())
        time.sleep(0.3)
        return make()

    check(cached(folder, KEY, make=slowly))


def test_those_who_come_meanwhile_wait(tmp_path):
    built = FORK.SimpleQueue()
    processes = [FORK.Process(target=build_slowly, args=(tmp_path, built)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    built.get()
    assert built.empty()


def test_nodes_without_a_lock_in_common_each_build_and_the_first_stays(tmp_path, monkeypatch):
    """Locks are each node's own, and so are the numbers of processes."""
    node = ["11111111", 1 << 30]  # of no process here
    monkeypatch.setattr(file_lock, "wait_for", lambda path: contextlib.nullcontext())
    monkeypatch.setattr(store, "_machine", lambda: node[0])
    monkeypatch.setattr(store.os, "getpid", lambda: node[1])
    entry, built = entry_path(tmp_path, KEY), []

    def slowly():
        for row in range(7):
            yield {"small": np.full((1, 1), row, np.int32), "empty": np.zeros((0, 2), np.uint32)}
            if row == 3:
                node[:] = ["22222222", 1 << 29]
                check(cached(tmp_path, KEY, make=make))
                built.append(entry.stat().st_ino)
                node[:] = ["11111111", 1 << 30]

    check(cached(tmp_path, KEY, make=slowly))
    assert list(tmp_path.iterdir()) == [entry] and built == [entry.stat().st_ino]


@pytest.mark.parametrize("damaged", [False, True])
def test_many_processes_without_any_lock_all_get_the_arrays(tmp_path, monkeypatch, damaged):
    def refused(fd, how):
        raise OSError(errno.ENOSYS, "no locks")

    monkeypatch.setattr(file_lock.fcntl, "flock", refused)
    keys = [{**KEY, "length": length} for length in range(12)]
    start = FORK.Barrier(4, timeout=60)

    def build():
        for key in keys:
            start.wait()
            check(cached(tmp_path, key, make=make))

    for key in keys if damaged else ():
        cached(tmp_path, key, make=make)
        (entry_path(tmp_path, key) / "small.npy").write_bytes(b"damage")
    processes = [FORK.Process(target=build) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    for key in keys:
        check(cached(tmp_path, key, make=never))
    assert sorted(tmp_path.iterdir()) == sorted(entry_path(tmp_path, key) for key in keys)


def test_what_killed_builders_left_is_cleared_away_and_nothing_else(tmp_path):
    ours, others = store._machine(), "12345678"
    names = [f"{ours}-{1 << 30}-aa", f"{ours}-{os.getpid()}-bb", f"{others}-{1 << 30}-cc", f"{others}-{1 << 30}-dd"]
    left = [tmp_path / f".{entry_path(tmp_path, KEY).name}.{name}" for name in names]
    for folder in left:
        folder.mkdir()
        (folder / ".small.npy.partial").touch()
        os.utime(folder / ".small.npy.partial", (0, 0))
    os.utime(left[3], (0, 0))  # nobody has written there for long
    check(cached(tmp_path, KEY, make=make))
    assert [folder.exists() for folder in left] == [False, True, True, False]


def test_a_read_only_folder_serves_what_it_has(tmp_path):
    cached(tmp_path / "cache", KEY, make=make)
    tmp_path.joinpath("cache").chmod(0o500)
    try:
        check(cached(tmp_path / "cache", KEY, make=never))
    finally:
        tmp_path.joinpath("cache").chmod(0o700)


def test_the_key_stands_in_the_entry(tmp_path):
    cached(tmp_path, KEY, make=make)
    assert json.loads((entry_path(tmp_path, KEY) / FACTS).read_text())["key"] == KEY
