"""Where arrays are cached: in the given folder, otherwise beside the corpus, otherwise in the user's folder."""

from __future__ import annotations

import os
import threading
import time
from typing import ClassVar

import numpy as np
import pytest

from mdata import UsageError
from mdata.array_cache.cache import Cache
from mdata.progress import Silent

KEY = {"name": "numbers", "corpus": "abc"}
LARGE = 1 << 40


def make():
    yield {"one": np.arange(3)}
    yield {"one": np.arange(2)}


def never():
    raise AssertionError("built again")


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.delenv("MDATA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "x.json"


def asked(cache, corpus, *, make=make, entries=LARGE):
    found = cache.arrays(corpus, KEY, make=make, entries=lambda: entries)
    assert found["one"].tolist() == [0, 1, 2, 0, 1]
    return cache.log[-1]


def test_beside_the_corpus(corpus):
    first, second = asked(Cache(), corpus), asked(Cache(), corpus, make=never)
    assert first.path.parent == second.path.parent == corpus.parent / "cache"
    assert (first.built, second.built) == (True, False)
    assert (first.name, first.corpus, first.rows, first.num_bytes) == ("numbers", "abc", 5, 40)


def test_in_the_users_own_where_nothing_can_be_written(corpus, tmp_path):
    (corpus.parent / "cache").write_text("in the way of a folder, also for a user who may do everything")
    assert asked(Cache(), corpus).path.parent == tmp_path / "user" / "mdata"
    assert not asked(Cache(), corpus, make=never).built


def test_a_user_without_a_home_folder_has_no_folder_of_their_own(corpus, monkeypatch):
    """As in a container with a user id that /etc/passwd does not name."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: (1 << 32) - 7)
    assert asked(Cache(), corpus).path.parent == corpus.parent / "cache"


def test_what_others_built_there_is_used(corpus):
    asked(Cache(), corpus)
    before = sorted((path, path.stat().st_mtime_ns) for path in corpus.parent.rglob("*"))
    (corpus.parent / "cache").chmod(0o500)
    try:
        assert asked(Cache(), corpus, make=never).path.parent == corpus.parent / "cache"
    finally:
        (corpus.parent / "cache").chmod(0o700)
    assert sorted((path, path.stat().st_mtime_ns) for path in corpus.parent.rglob("*")) == before


def test_in_the_folder_that_is_given(corpus, tmp_path, monkeypatch):
    assert asked(Cache(str(tmp_path / "mine")), corpus, entries=5).path.parent == tmp_path / "mine"
    monkeypatch.setenv("MDATA_CACHE", str(tmp_path / "theirs"))
    assert asked(Cache(), corpus, entries=5).path.parent == tmp_path / "theirs"
    assert not (corpus.parent / "cache").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="File exists"):
        asked(Cache(str(tmp_path / "file")), corpus)


def test_of_several_at_once_one_builds_and_the_others_say_that_they_found_it(corpus):
    caches, together = [Cache() for _ in range(3)], threading.Barrier(3)

    def slowly():
        time.sleep(0.3)
        return make()

    def one(cache):
        together.wait()
        asked(cache, corpus, make=slowly)

    threads = [threading.Thread(target=one, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(cache.log[0].built for cache in caches) == [False, False, True]


def test_damage_is_told_once(corpus):
    class Listener(Silent):
        notes: ClassVar[list[str]] = []

        def note(self, text):
            self.notes.append(text)

    entry = asked(Cache(), corpus).path
    (entry / "one.npy").write_bytes(b"")
    assert asked(Cache(progress=Listener()), corpus).built
    assert len(Listener.notes) == 1
    assert "is built again: one.npy has 0 bytes" in Listener.notes[0]


def test_small_ones_are_built_in_memory(corpus):
    small = asked(Cache(), corpus, entries=5)
    assert (small.path, small.built) == (None, True)
    assert not (corpus.parent / "cache").exists()
    assert asked(Cache(all=True), corpus, entries=5).path.parent == corpus.parent / "cache"
    assert not asked(Cache(), corpus, make=never, entries=5).built
