"""A corpus with very many shards: opened by checking only file sizes, and read like any other."""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest

import mdata
from mdata.corpus import shard_readers
from mdata.errors import DamageError, UsageError
from mdata.indexed.reader import IndexedReader
from mdata.manifest.contained_paths import shards_inside
from mdata.manifest.io import save_manifest
from mdata.manifest.types import CorpusManifest
from tests.helpers.corpora import write_pair


@pytest.fixture
def corpus(tmp_path):
    """Six shards in two folders; what they hold is 0, 1, 2 ... from each folder's first."""
    shards = []
    for number in range(6):
        prefix = tmp_path / f"{'ab'[number // 3]}/s{number}"
        prefix.parent.mkdir(exist_ok=True)
        write_pair(prefix, [[3, 2], [], [4 + number]], tokens=np.arange(9 + number) + 100 * number)
        (shard,) = mdata.adopt(prefix, None).manifest.shards
        path = f"{prefix.parent.name}/{prefix.name}"
        shards.append(msgspec.structs.replace(shard, path=path, blocks=None))
    made = mdata.load_manifest(tmp_path / "a/s0.json")
    assert isinstance(made, CorpusManifest)
    save_manifest(msgspec.structs.replace(made, shards=shards, provenance=None, statistics=None), tmp_path / "x.json")
    return tmp_path / "x.json"


@pytest.fixture
def many(monkeypatch):
    """So few shards count as very many, and as too many for maps."""
    monkeypatch.setattr(shard_readers, "MOST_OPENED", 3)
    monkeypatch.setattr(shard_readers, "MOST_MAPPED", 5)


def test_it_reads_as_one_of_few_shards_does(corpus, many, monkeypatch):
    opened = mdata.open_corpus(corpus)
    with monkeypatch.context() as patch:
        patch.setattr(shard_readers, "MOST_OPENED", 100)
        plain = mdata.open_corpus(corpus)
    assert (opened.mode, plain.mode) == ("pread", "mmap")
    assert (opened.read(0, opened.num_tokens) == plain.read(0, plain.num_tokens)).all()
    for name in ("num_documents", "num_sequences", "num_tokens", "contiguous", "dtype", "id"):
        assert getattr(opened, name) == getattr(plain, name), name
    assert [list(opened.document(n)) for n in range(18)] == [list(plain.document(n)) for n in range(18)]
    one, other = (mdata.open_dataset(corpus, sequence_length=8) for _ in range(2))
    assert (one[3]["tokens"] == other[3]["tokens"]).all()


def test_nothing_is_opened_before_it_is_read(corpus, many, monkeypatch):
    for name in ("_look", "_hold", "check"):
        monkeypatch.setattr(IndexedReader, name, lambda *_: pytest.fail("opened"))
    assert mdata.open_corpus(corpus).num_documents == 18


def test_files_that_are_not_those_of_the_manifest_are_named(corpus, many):
    index, tokens = corpus.parent / "b/s4.idx", corpus.parent / "b/s4.bin"
    kept = index.read_bytes()
    index.write_bytes(kept[:-1])
    with pytest.raises(DamageError, match=r"s4\.idx is not the one that x\.json describes\n  found: 101 bytes"):
        mdata.open_corpus(corpus)
    # Of the right size, and something else: refused before any of its tables is used.
    index.write_bytes(kept[:40] + b"\1" + kept[41:])
    opened = mdata.open_corpus(corpus)
    with pytest.raises(DamageError, match=r"s4\.idx is not the one that x\.json describes, so no sample"):
        opened.document(12)
    index.write_bytes(kept)
    opened = mdata.open_corpus(corpus)
    tokens.write_bytes(bytes(len(tokens.read_bytes())))
    with pytest.raises(DamageError, match=r"s4\.bin was replaced or changed while it was in use"):
        opened.read(40, 12)
    tokens.unlink()
    with pytest.raises(UsageError, match=r"s4\.bin"):
        mdata.open_corpus(corpus)


def test_a_folder_is_looked_at_once_and_still_must_lie_inside(tmp_path, monkeypatch):
    (tmp_path / "in/a").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "in/link").symlink_to(tmp_path / "out")
    manifest = tmp_path / "in/x.json"
    looked, kept = [], os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path: looked.append(path) or kept(path))
    names = [f"a/s{number}" for number in range(50)] + ["top"]
    assert shards_inside(manifest, names) == [manifest.parent / name for name in names]
    assert len(looked) <= 3
    for bad in ("link/s", "../out/s", "a/..", "a/../../out/s", "a/../.."):
        with pytest.raises(UsageError, match="lies outside its folder"):
            shards_inside(manifest, ["a/s", bad])
