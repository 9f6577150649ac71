"""The sample: always the same, spread over the whole input, with any compression."""

from __future__ import annotations

import gzip
import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata.sources.chunk import chunks
from mdata.sources.record_batch import ReadSpec
from mdata.tokenizer_training.text_sample import take_sample
from mdata.util.random_keys import derive_key
from tests.helpers.examples import examples
from tests.helpers.notes import Notes
from tests.mdata.sources.inputs import find_files

SPEC = ReadSpec()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(sys.modules["mdata.tokenizer_training.text_sample"], "CHUNK_BYTES", 100)


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def numbered(count: int) -> list[str]:
    return [f"text number {number:06}" for number in range(count)]


def texts_of(paths, *, sample_bytes=10**9, seed=0, spec=SPEC, **how) -> list[str]:
    return list(take_sample(find_files(paths), spec, sample_bytes=sample_bytes, seed=seed).texts(**how))


def test_a_small_input_is_taken_whole(tmp_path):
    texts = numbered(50)
    write(tmp_path / "a.jsonl", texts[:30])
    write(tmp_path / "b.jsonl", texts[30:])
    assert texts_of([tmp_path]) == texts


def test_a_sample_is_spread_repeatable_and_of_its_size(tmp_path):
    texts = numbered(3000)
    path = write(tmp_path / "x.jsonl", texts)
    first = take_sample(find_files([path]), SPEC, sample_bytes=12_000, seed=1)
    assert first.input_bytes == path.stat().st_size and 11_800 <= first.sampled_bytes <= 12_000
    found = list(first.texts())
    assert list(first.texts()) == found == texts_of([path], sample_bytes=12_000, seed=1)
    assert texts_of([path], sample_bytes=12_000, seed=2) != found
    places = [texts.index(text) for text in found]
    assert places == sorted(places) and len(set(places)) == len(places)
    for quarter in range(4):  # of about 300 texts
        assert 30 < sum(750 * quarter <= place < 750 * (quarter + 1) for place in places) < 130


def test_a_larger_sample_holds_the_smaller_one(tmp_path):
    path = write(tmp_path / "x.jsonl", numbered(500))
    samples = [set(texts_of([path], sample_bytes=size)) for size in (1, 100, 1000, 5000, 10**6)]
    assert all(a <= b for a, b in pairwise(samples)) and len(samples[0]) >= 1


def test_packed_and_plain_give_the_same(tmp_path, monkeypatch):
    texts = numbered(2000)
    plain = write(tmp_path / "x.jsonl", texts)
    packed = tmp_path / "y.jsonl"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    expected = texts_of([plain], sample_bytes=5000)
    assert texts_of([packed], sample_bytes=5000) == expected
    with plain.open("rb") as file:
        before = os.dup(0)
        try:
            os.dup2(file.fileno(), 0)
            assert texts_of(["-"], sample_bytes=5000) == expected
        finally:
            os.dup2(before, 0)
            os.close(before)


def test_parquet_and_plain_text(tmp_path):
    texts = numbered(2000)
    pq.write_table(pa.table({"text": texts}), tmp_path / "x.parquet")
    found = texts_of([tmp_path / "x.parquet"], sample_bytes=5000)
    assert found and set(found) < set(texts)
    (tmp_path / "x.txt").write_text("\n\n".join(texts))
    spec = ReadSpec(text_documents="paragraph")
    found = texts_of([tmp_path / "x.txt"], sample_bytes=5000, spec=spec)
    assert 150 < len(found) < 300 and set(found) < set(texts)


@examples(100)
@given(
    sizes=st.lists(st.lists(st.integers(0, 200), max_size=20), min_size=1, max_size=3),
    sample_bytes=st.integers(1, 3000),
    seed=st.integers(-5, 5),
)
def test_by_sorting_all_priorities(tmp_path_factory, sizes, sample_bytes, seed):
    """The slow way: all chunks sorted by priority, taken until one does not fit; the first always."""
    folder = tmp_path_factory.mktemp("s")
    for number, lengths in enumerate(sizes):
        write(folder / f"{number}.jsonl", ["x" * length for length in lengths])
        if number % 2:
            (folder / f"{number}.jsonl").write_bytes(gzip.compress((folder / f"{number}.jsonl").read_bytes()))
    files = find_files([folder])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["mdata.tokenizer_training.text_sample"], "CHUNK_BYTES", 100)
        found = take_sample(files, SPEC, sample_bytes=sample_bytes, seed=seed)
    everything = list(chunks(files, 100, spec=SPEC))
    by_priority = sorted(
        everything, key=lambda chunk: derive_key("tokenizer sample", seed, chunk.file_number, chunk.number).draw
    )
    taken, total = [], 0
    for chunk in by_priority:
        total += chunk.stop - chunk.start
        if total > sample_bytes and taken:
            break
        taken.append((chunk.file_number, chunk.number))
    assert [(chunk.file_number, chunk.number) for chunk, _ in found.chunks] == sorted(taken)
    assert found.input_bytes == sum(chunk.stop - chunk.start for chunk in everything)
    assert found.sampled_bytes == sum(chunk.stop - chunk.start for chunk, _ in found.chunks)


@pytest.mark.parametrize("packed", [False, True])
def test_a_bad_row_is_named_by_its_row_in_the_file(tmp_path, packed):
    """Though only a sample is read."""
    texts = numbered(300)
    path = write(tmp_path / "x.jsonl", texts)
    lines = path.read_text().splitlines()
    sampled = texts_of([path], sample_bytes=2000)
    row = texts.index(sampled[len(sampled) // 2])
    lines[row] = lines[row].replace('"text":', '"twxt":')
    path.write_bytes((gzip.compress if packed else bytes)(("\n".join(lines) + "\n").encode()))
    with pytest.raises(mdata.BadInputError, match=rf"x\.jsonl:{row + 1}: no key 'text'"):
        texts_of([path], sample_bytes=2000)

    heard = Notes()
    found = texts_of([path], sample_bytes=2000, on_error="skip", progress=heard)
    assert found == [text for text in sampled if text != texts[row]]
    (line,) = heard.lines
    assert line.startswith(f"skipped 1 row that cannot be used; the first: {path}:{row + 1}: no key")


def test_a_bad_row_of_standard_input(tmp_path):
    path = write(tmp_path / "x.jsonl", numbered(30))
    path.write_text(path.read_text() + "{}\n")
    before = os.dup(0)
    with path.open("rb") as file:
        try:
            os.dup2(file.fileno(), 0)
            with pytest.raises(mdata.BadInputError, match="-:31: no key 'text'"):
                texts_of(["-"])
        finally:
            os.dup2(before, 0)
            os.close(before)


def test_a_file_that_changes_is_noticed(tmp_path):
    path = write(tmp_path / "x.jsonl", numbered(30))
    sample = take_sample(find_files([path]), SPEC, sample_bytes=10**6, seed=0)
    path.write_text(path.read_text() + "\n")
    with pytest.raises(mdata.UsageError, match="changed while it was read"):
        list(sample.texts())


def test_a_huge_input_has_no_more_than_a_million_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["mdata.tokenizer_training.text_sample"], "_MOST_CHUNKS", 8)
    path = write(tmp_path / "x.jsonl", numbered(300))
    sample = take_sample(find_files([path]), SPEC, sample_bytes=10**6, seed=0)
    assert len(sample.chunks) <= 8 and sample.chunk_bytes > 100
    assert len(list(sample.texts())) == 300
