"""The batched read against its slow twins, in both modes, and over files that change while they are open."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import DamageError, ResourceError
from mdata._core import RowRules, cumulative_lengths, finish_rows
from mdata.indexed.gather import Gatherer
from mdata.indexed.reader import IndexedReader
from tests.helpers.corpora import write_pair
from tests.helpers.examples import examples
from tests.reference import gather as slow

DOCUMENTS = st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=8)


def pairs(folder, shards, **options) -> list[IndexedReader]:
    """One pair for each list of documents; tokens count on from pair to pair."""
    total = 0
    for number, shard in enumerate(shards):
        size = sum(map(sum, shard))
        write_pair(folder / f"s{number}", shard, tokens=np.arange(total, total + size), code=8)
        total += size
    return [IndexedReader(folder / f"s{number}", **options) for number in range(len(shards))]


def int64s(values) -> np.ndarray:
    return np.array(values, np.int64)


@examples(80)
@given(st.lists(DOCUMENTS, min_size=1, max_size=3), st.sampled_from(["mmap", "pread"]), st.data())
def test_rows_are_those_of_the_twin(tmp_path_factory, shards, mode, data):
    readers = pairs(tmp_path_factory.mktemp("g"), shards, mode=mode)
    total = sum(reader.num_tokens for reader in readers)
    run = st.integers(0, total).flatmap(lambda first: st.tuples(st.just(first), st.integers(0, total - first)))
    rows = data.draw(st.lists(st.lists(run, max_size=3), max_size=4))
    width = max([sum(count for _, count in runs) for runs in rows], default=0) + data.draw(st.integers(1, 3))
    flat = [run for runs in rows for run in runs]
    places = data.draw(st.permutations(range(len(rows))))
    out = np.full((len(rows), width), -1, np.int64)
    Gatherer(readers).gather(
        int64s([first for first, _ in flat]),
        int64s([count for _, count in flat]),
        ends=np.cumsum([len(runs) for runs in rows], dtype=np.int64),
        out_rows=int64s(places),
        out=out,
        fill=-5,
        threads=data.draw(st.integers(1, 3)),
    )
    expected = slow.gather([reader.tokens(0, reader.num_tokens) for reader in readers], rows, width=width, fill=-5)
    assert [out[place].tolist() for place in places] == expected


@examples(80)
@given(st.lists(DOCUMENTS, min_size=1, max_size=3), st.sampled_from(["mmap", "pread"]), st.data())
def test_documents_inside_rows_are_those_of_the_twin(tmp_path_factory, shards, mode, data):
    readers = pairs(tmp_path_factory.mktemp("g"), shards, mode=mode, contiguous=True)
    lengths = [sum(document) for shard in shards for document in shard]
    total = sum(lengths)
    starts = data.draw(st.lists(st.integers(0, total), max_size=5))
    counts = [data.draw(st.integers(0, total - start)) for start in starts]
    gatherer = Gatherer(readers)
    ends, places = gatherer.cuts(int64s(starts), int64s(counts))
    found = [part.tolist() for part in np.split(places, ends)][: len(starts)]
    assert found == [slow.cuts(lengths, pair) for pair in zip(starts, counts, strict=True)]
    first, count = gatherer.documents(np.arange(len(lengths)))
    assert (count.tolist(), first.tolist()) == (lengths, np.cumsum([0, *lengths])[:-1].tolist())


@examples(200)
@given(st.data())
def test_rows_are_finished_as_by_the_twin(data):
    tokens, ids = st.integers(-1, 3), st.none() | st.integers(-1, 3)
    length = data.draw(st.integers(1, 12))
    text = data.draw(st.lists(st.lists(tokens, min_size=length + 1, max_size=length + 1), max_size=3))
    counts = [data.draw(st.integers(0, length + 1)) for _ in text]
    cuts = [sorted(data.draw(st.lists(st.integers(0, length), max_size=4))) for _ in text]
    pad, eod, mask, restart, apart = data.draw(st.tuples(ids, ids, *[st.booleans()] * 3))
    cells = int64s(text).reshape(len(text), length + 1)
    loss, positions = np.full((len(text), length), 7, np.float32), np.full((len(text), length), 7, np.int64)
    flat = int64s(np.cumsum([len(row) for row in cuts])), np.array([cut for row in cuts for cut in row], np.int32)
    finish_rows(cells, int64s(counts), flat, loss, positions, RowRules(pad, eod, mask, restart, apart))
    for i, row in enumerate(text):
        expected = slow.finish(
            row,
            counts[i],
            cuts=cuts[i],
            pad=pad,
            mask_eod=eod if mask else None,
            restart_at_eod=eod if restart else None,
            mask_document_ends=apart,
        )
        assert slow.Row(cells[i].tolist(), loss[i].tolist(), positions[i].tolist()) == expected
    starts = sorted({0, *(i * length + cut for i, row in enumerate(cuts) for cut in (0, length, *row))})
    cu_seqlens, longest = cumulative_lengths(*flat, length)
    assert cu_seqlens.tolist() == starts
    assert longest == max(np.diff(starts), default=0)


@pytest.mark.parametrize("count", [0, 1, 2, 1024, 1025, 1026, 2048, 2049, 2500, 2501])
def test_long_rows_have_loss_up_to_their_last_label(count):
    """Ones are written by the kibi: the edges of its blocks, and nothing behind the row."""
    loss = np.full((3, 2500), 7, np.float32)
    text = np.zeros((1, 2501), np.int64)
    finish_rows(text, int64s([count]), None, loss[1:2], None, RowRules(None, None, False, False))
    labels = max(0, count - 1)
    assert (loss[1] == np.repeat([1, 0], [labels, 2500 - labels])).all()
    assert (loss[[0, 2]] == 7).all()


def read_all(readers, mode="one thread") -> np.ndarray:
    total = sum(reader.num_tokens for reader in readers)
    out = np.zeros((1, total), np.int64)
    Gatherer(readers).gather(int64s([0]), int64s([total]), out=out)
    return out


def test_a_file_that_is_cut_while_it_is_open_is_damage(tmp_path):
    readers = pairs(tmp_path, [[[30]], [[5000]]], mode="pread")
    os.truncate(tmp_path / "s1.bin", 1001)
    with pytest.raises(DamageError, match=r"s1\.bin: it is shorter than(.|\n)*end at byte 1001(.|\n)*10000 bytes"):
        read_all(readers)
    with pytest.raises(DamageError, match="end at byte 1001"):
        readers[1].tokens(400, 200)


def test_a_file_that_is_replaced_while_it_is_open_stays_the_old_one(tmp_path):
    for mode in ("mmap", "pread"):
        readers = pairs(tmp_path, [[[30]]], mode=mode)
        (tmp_path / "s0.bin").rename(tmp_path / "old.bin")
        (tmp_path / "s0.bin").write_bytes(b"")
        assert read_all(readers)[0].tolist() == list(range(30))


def test_what_the_system_says_is_told_with_the_file(tmp_path, monkeypatch):
    readers = pairs(tmp_path, [[[30]]], mode="pread")
    error = Gatherer(readers)._read_fault(0, 8, errno.EIO)
    assert isinstance(error, ResourceError)
    assert "s0.bin: Input/output error" in str(error)


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_an_index_is_judged_where_it_is_used(tmp_path, mode):
    pairs(tmp_path, [[[4], [4], [4], [4]]])
    index = bytearray((tmp_path / "s0.idx").read_bytes())
    index[34 + 16 + 2 * 8] = 9  # the pointer of sequence 2
    (tmp_path / "s0.idx").write_bytes(index)
    with pytest.raises(DamageError, match="pointer of sequence 2"):
        IndexedReader(tmp_path / "s0", mode=mode)
    reader = IndexedReader(tmp_path / "s0", mode=mode, contiguous=True)
    assert read_all([reader])[0].tolist() == list(range(16))
    assert reader.first_token(1) == 4
    for sequence in (2, 3):
        with pytest.raises(DamageError, match=f"pointer of sequence {sequence}"):
            reader.first_token(sequence)
    with pytest.raises(DamageError, match="bad pointer of sequence 2"):
        Gatherer([reader]).documents(np.arange(4))
    with pytest.raises(DamageError, match="bad pointer of sequence 2"):
        Gatherer([reader]).cuts(int64s([0]), int64s([16]))
    with pytest.raises(DamageError, match="pointer of sequence 2"):
        _ = reader.lengths


def test_what_a_manifest_says_of_the_order_in_the_file_is_checked_with_the_tables(tmp_path):
    pairs(tmp_path, [[[2], [2]]])
    reader = IndexedReader(tmp_path / "s0", contiguous=False)
    with pytest.raises(DamageError, match=r"are not laid out as its manifest says(.|\n)*contiguous: True"):
        _ = reader.pointers


def test_a_request_that_does_not_fit_is_refused(tmp_path):
    (reader,) = pairs(tmp_path, [[[30]]])
    gatherer = Gatherer([reader])
    with pytest.raises(IndexError, match="run outside"):
        gatherer.gather(int64s([20]), int64s([11]), out=np.zeros((1, 20), np.int64))
    with pytest.raises(ValueError, match="longer than their row"):
        gatherer.gather(int64s([0]), int64s([11]), out=np.zeros((1, 10), np.int64))
    with pytest.raises(IndexError, match="number outside"):
        gatherer.documents(int64s([1]))
    with pytest.raises(IndexError, match="tokens outside"):
        gatherer.cuts(int64s([0]), int64s([31]))
    with pytest.raises(IndexError, match="number outside"):
        gatherer.pieces(np.array([1], np.int32), int64s([0, 0, 0, 0]), extra=0)


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_tokens_past_two_to_the_31_are_read(tmp_path, mode):
    """A sparse .bin: two sequences of 1.2 billion tokens, of which the last ones are there."""
    length = 1_200_000_000
    write_pair(tmp_path / "s0", [[1], [1]], code=8)
    index = bytearray((tmp_path / "s0.idx").read_bytes())
    index[34:58] = np.array([length, length], "<i4").tobytes() + np.array([0, 2 * length], "<i8").tobytes()
    (tmp_path / "s0.idx").write_bytes(index)
    with (tmp_path / "s0.bin").open("wb") as file:
        file.seek(2 * (2 * length - 3))
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    reader = IndexedReader(tmp_path / "s0", mode=mode)
    out = np.zeros((2, 5), np.int64)
    Gatherer([reader]).gather(int64s([2 * length - 5, 2**31 - 2]), int64s([5, 5]), out=out)
    assert out.tolist() == [[0, 0, 7, 8, 9], [0] * 5]
    ends, places = Gatherer([reader]).cuts(int64s([length - 2, 2**31]), int64s([4, 10]))
    assert (ends.tolist(), places.tolist()) == ([1, 1], [2])
    assert reader.first_token(1) == length
