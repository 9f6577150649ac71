"""Files with a fixed identity: many are read with two open at once; another file with the name is refused."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import _core
from mdata.errors import DamageError, ResourceError, UsageError
from mdata.indexed import mapped_files
from mdata.indexed.gather import Gatherer
from mdata.indexed.reader import IndexedReader
from tests.helpers.corpora import write_pair
from tests.helpers.examples import examples

FILES = 9


def pair(folder: Path, name: str = "a", *, lengths=(30, 20), **options) -> IndexedReader:
    write_pair(folder / name, [list(lengths)])
    return IndexedReader(folder / name, **options)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """File n holds the uint16s n, n + 1, ... n + 2999."""
    folder = tmp_path_factory.mktemp("files")
    for number in range(FILES):
        np.arange(number, number + 3000).astype(np.uint16).tofile(folder / str(number))
    return [folder / str(number) for number in range(FILES)]


def pooled(paths, most):
    pool = _core.FilePool(most)
    return pool, [_core.PooledFile(pool, os.fsencode(path), mapped_files.look_at(path)) for path in paths]


@examples(30)
@given(st.integers(1, FILES), st.lists(st.tuples(st.integers(0, 3000 * FILES - 1), st.integers(0, 7000)), max_size=30))
def test_rows_from_a_pool_are_those_of_the_files(numbered, most, runs):
    pool, opened = pooled(numbered, most)
    store = _core.TokenStore("uint16", [(None, file, 3000) for file in opened])
    stream = np.concatenate([np.fromfile(path, np.uint16) for path in numbered]).astype(np.int64)
    first = np.array([start for start, _ in runs], np.int64)
    count = np.array([min(length, len(stream) - start) for start, length in runs], np.int64)
    out = np.empty((len(runs), 7000), np.int64)
    assert store.gather(first, count, None, None, out, -1, 3) is None
    for row, start, length in zip(out, first.tolist(), count.tolist(), strict=True):
        assert row[:length].tolist() == stream[start : start + length].tolist()
    assert pool.num_open() <= most


def test_four_threads_by_two_open_files(numbered):
    pool, opened = pooled(numbered, 2)
    store = _core.TokenStore("uint16", [(None, file, 3000) for file in opened])
    wrong = []

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(150):
            first = random.integers(0, 3000 * FILES - 3500, 8)
            out = np.empty((8, 3500), np.int64)
            fault = store.gather(first, np.full(8, 3500), None, None, out, 0, 1)
            tokens = first[:, None] + np.arange(3500)
            if fault is not None or (out != tokens // 3000 + tokens % 3000).any():
                wrong.append(seed)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(read, range(4)))  # raises what one of them raised
    assert not wrong
    assert pool.num_open() == 2


def test_single_reads_end_with_the_file(numbered):
    _, (file,) = pooled(numbered[1:2], 1)
    assert np.frombuffer(file.read(4, 6), np.uint16).tolist() == [3, 4, 5]
    assert (len(file.read(5990, 100)), file.read(7000, 5), file.read(0, 0)) == (10, b"", b"")
    with pytest.raises(ValueError, match="before the file"):
        file.read(-1, 5)


def replace(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "another":
        path.rename(path.with_suffix(".old"))
        path.write_bytes(content)
        stat = path.with_suffix(".old").stat()
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    elif how == "changed":
        path.write_bytes(content[::-1])
        os.utime(path, ns=(1, 1))
    else:
        os.truncate(path, len(content) - 1)


@pytest.mark.parametrize("mode", ["mmap", "pread"])
@pytest.mark.parametrize("time_ns", [-11_644_473_600 * 10**9, -1, (1 << 63) - 1, 1 << 63, 12 * 10**18])
def test_files_of_any_time_are_read(tmp_path, mode, time_ns):
    pair(tmp_path)
    os.utime(tmp_path / "a.bin", ns=(time_ns, time_ns))
    assert (tmp_path / "a.bin").stat().st_mtime_ns == time_ns, "the file system has other times"
    reader = IndexedReader(tmp_path / "a", mode=mode)
    assert reader.tokens(0, 3).tolist() == [0, 1, 2]
    again = IndexedReader(tmp_path / "a", mode=mode, known_facts=reader.facts)
    assert again.tokens(0, 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("how", ["another", "changed", "cut"])
def test_a_file_that_the_pool_opens_again_must_be_the_same(tmp_path, monkeypatch, how):
    monkeypatch.setattr(mapped_files, "POOL", _core.FilePool(1))
    reader, other = (pair(tmp_path, name, mode="pread") for name in "ab")
    replace(reader.bin_path, how)
    assert other.tokens(0, 3).tolist() == [0, 1, 2]
    with pytest.raises(DamageError, match=r"a\.bin was replaced or changed while it was in use"):
        reader.tokens(0, 3)
    with pytest.raises(DamageError, match=r"a\.bin was replaced or changed while it was in use"):
        Gatherer([reader]).gather(np.array([0]), np.array([3]), out=np.empty((1, 3), np.int64))


@pytest.mark.parametrize("mode", ["mmap", "pread"])
@pytest.mark.parametrize("how", ["another", "changed", "cut"])
def test_what_is_known_of_a_pair_holds_for_the_same_files_only(tmp_path, mode, how):
    first = pair(tmp_path, mode=mode)
    again = IndexedReader(tmp_path / "a", mode=mode, known_facts=first.facts)
    assert again.facts == first.facts
    assert again.sequence(1).tolist() == first.sequence(1).tolist()
    for path, read in ((first.bin_path, lambda one: one.tokens(0, 1)), (first.idx_path, lambda one: one.lengths)):
        late = IndexedReader(tmp_path / "a", mode=mode, known_facts=first.facts)
        replace(path, how)
        with pytest.raises(DamageError, match=f"{path.name} was replaced or changed"):
            read(late)


def test_an_index_that_is_replaced_before_its_first_use_is_refused(tmp_path):
    pair(tmp_path)
    for mode in ("mmap", "pread"):
        reader = IndexedReader(tmp_path / "a", mode=mode, contiguous=True)
        replace(reader.idx_path, "another")
        for use in (lambda one: one.first_token(1), lambda one: one.boundaries):
            with pytest.raises(DamageError, match=r"a\.idx was replaced or changed"):
                use(reader)


def test_what_is_gone_or_cannot_be_read_is_told(tmp_path):
    with pytest.raises(UsageError, match="none: No such file"):
        mapped_files.look_at(tmp_path / "none")
    known = pair(tmp_path).facts
    (tmp_path / "a.bin").unlink()
    for mode in ("mmap", "pread"):
        with pytest.raises(UsageError, match=r"a\.bin: No such file"):
            IndexedReader(tmp_path / "a", mode=mode, known_facts=known).tokens(0, 1)
    error = IndexedReader(tmp_path / "a", known_facts=known).read_fault(8, errno.EIO)
    assert isinstance(error, ResourceError)
    assert "a.bin: Input/output error" in str(error)
