"""Sorted runs in files: merged in rounds as in one, cut by keys, and refused when torn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import DamageError, _core
from mdata.dedup import runs as module
from mdata.dedup.runs import SortedRun, SortedWriter, check_size, merged
from tests.helpers.examples import examples

KEYS = st.sampled_from([0, 1, 5, 2**63, 2**64 - 1])


def _written(path: Path, records: list[tuple[int, ...]], words: int, added: int = 0) -> SortedRun:
    array = np.array(sorted(records), np.uint64).reshape(-1, words)
    with path.open("ab") as file:
        offset = file.tell()
        file.write(array.tobytes())
    return SortedRun(path, offset, len(array), added)


@pytest.mark.parametrize("words", [2, 3])
@examples(60)
@given(data=st.data())
def test_records_of_any_runs_are_those_of_one_sorted_list(words, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    record = st.tuples(*[KEYS] * (words - 1), st.integers(0, 30))
    parts = data.draw(st.lists(st.lists(record, max_size=12, unique=True), min_size=1, max_size=7))
    runs = [_written(folder / "all", part, words, 100 * place) for place, part in enumerate(parts)]
    low, high = sorted(data.draw(st.tuples(KEYS, KEYS)))
    shifted = [(*r[:-1], r[-1] + 100 * place) for place, part in enumerate(parts) for r in part]
    expected = sorted(r for r in shifted if low <= r[0] < high)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_RUNS", data.draw(st.integers(2, 8)))
        patch.setattr(module, "BUFFERS_BYTES", data.draw(st.integers(1, 500)))
        with merged(runs, words, scratch=folder / "x", low=low, high=high) as merger:
            found = list[list[int]]()
            while len(part := merger.records(3)):
                found += part.tolist()
    assert [tuple(row) for row in found] == expected
    assert [path.name for path in folder.iterdir()] == ["all"]


def test_a_writer_sorts_what_does_not_fit_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SORTED_RECORDS", 8)
    records = np.random.default_rng(1).integers(0, 50, (37, 2)).astype(np.uint64)
    writer = SortedWriter(tmp_path / "run", 2)
    for part in np.array_split(records, 5):
        writer.add(part)
    run = writer.finish()
    stored = np.fromfile(run.path, np.uint64).reshape(-1, 2).tolist()
    assert stored == sorted(records.tolist()) and run.count == 37
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    empty = SortedWriter(tmp_path / "empty", 2).finish()
    assert empty.count == 0 and empty.path.stat().st_size == 0


def test_torn_runs_are_refused_by_name(tmp_path):
    path = tmp_path / "sign" / "00000.run"
    path.parent.mkdir()
    run = _written(path, [(key, key) for key in range(1, 100)], 2)
    check_size(path, 16 * 99)
    whole = path.read_bytes()
    path.write_bytes(whole[:800] + bytes(160) + whole[960:])  # a block that never reached the disk
    sound = _written(tmp_path / "sign" / "00001.run", [(7, 7)], 2)
    for damaged, fix in ((run, f"remove {tmp_path}, and run the same"), (replace(run, repair="make it"), "make it")):
        unsorted = pytest.raises(DamageError, match=r"00000\.run is damaged\n  found: records that are not sorted")
        with unsorted as error, merged([sound, damaged], 2, scratch=tmp_path / "x") as merger:
            merger.edges(1000, chain=False)
        assert f"try: {fix}" in str(error.value)
    path.write_bytes(whole[:-8])
    too_short = r"00000\.run is damaged\n  found: 1576 bytes instead of 1584 or more"
    with pytest.raises(DamageError, match=too_short), merged([run], 2, scratch=tmp_path / "x") as merger:
        merger.records(1000)
    with pytest.raises(DamageError, match=r"00000\.run is torn\n  found: 1576 bytes\n  expected: 1584 bytes"):
        check_size(path, 16 * 99)
    path.unlink()
    with pytest.raises(DamageError, match=r"00000\.run is missing"):
        check_size(path, 16 * 99)


def test_hostile_arguments_are_refused(tmp_path):
    path = tmp_path / "words"
    path.write_bytes(np.arange(10, dtype=np.uint64).tobytes())
    with path.open("rb") as file:
        fd = file.fileno()
        with pytest.raises(ValueError, match="one or two words"):
            _core.RunMerger([(fd, 0, 2, 0)], 4, 100)
        with pytest.raises(OSError, match="Bad file descriptor"):
            _core.RunMerger([(-1, 0, 2, 0)], 2, 100)
        with pytest.raises(ValueError, match="ends too early"):
            _core.count_below((fd, 8, 2**40, 0), 2, 5)
        with pytest.raises(ValueError, match="two sets"):
            _core.common_words(np.zeros((2, 5), np.uint64))
        sets = np.array([[fd, 0, 6, fd, 32, 6], [fd, 0, 0, fd, 0, 10]], np.uint64)
        assert _core.common_words(sets).tolist() == [2, 0]
        with pytest.raises(ValueError, match="ends too early"):
            _core.common_words(np.array([[fd, 0, 11, fd, 0, 1]], np.uint64))
    with pytest.raises(IndexError, match="after its child"):
        _core.flatten_groups(np.array([0, 5, 1]))
    with pytest.raises(ValueError, match="no such unit"):
        _core.MinHashSigner(np.ones(2, np.uint64), np.ones(2, np.uint64), 2, 5, "lines")
