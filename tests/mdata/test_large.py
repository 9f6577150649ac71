"""Numbers past 32 bits: files, orders and builders with more tokens, samples and sequences than they hold.

All files are sparse, including lengths and tables: unwritten bytes are zero and take no space. Cases that would need
tens of gigabytes (a shuffle of 2^32 rows) are tested in parts: the chosen type, and that draws above 32 bits are
numpy's.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

import mdata
from mdata._core import Mersenne, fill_sample_index
from mdata.indexed.gather import Gatherer
from mdata.indexed.reader import IndexedReader
from mdata.order import megatron_order as megatron_room
from mdata.order.megatron_order import MegatronPlan, MegatronRequest, plan
from mdata.order.native_order import OrderKey, StreamOrder
from mdata.samples.sentence_mapping import MappingOptions, megatron_mapping
from mdata.util.random_keys import derive_key
from tests.helpers.masked import native_mapping
from tests.helpers.open_by_keys import open_by_keys
from tests.reference.native_order import native_start

PAST = 2**31 + 5


def sparse_pair(prefix: Path, lengths: list[int], *, code: int, written: dict[int, list[int]]) -> None:
    """A pair whose .bin holds only the tokens `written` at these places; all others are 0 and take no room."""
    dtype = np.dtype({4: "<i4", 8: "<u2"}[code])
    pointers = np.cumsum([0, *lengths[:-1]], dtype=np.int64) * dtype.itemsize
    boundaries = np.arange(len(lengths) + 1, dtype=np.int64)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(boundaries))
    body = (np.array(lengths, "<i4").tobytes(), pointers.tobytes(), boundaries.tobytes())
    Path(f"{prefix}.idx").write_bytes(header + b"".join(body))
    with Path(f"{prefix}.bin").open("wb") as file:
        file.truncate(sum(lengths) * dtype.itemsize)
        for place, tokens in written.items():
            file.seek(place * dtype.itemsize)
            file.write(np.array(tokens, dtype).tobytes())


@pytest.mark.parametrize("mode", ["mmap", "pread"])
@pytest.mark.parametrize("code", [4, 8])
@pytest.mark.parametrize("order", ["native", "megatron"])
def test_the_end_of_a_bin_past_two_to_the_31_tokens_is_read(tmp_path, mode, code, order):
    """Also past 2^32 bytes: 4.3 GB of uint16, 8.6 GB of int32. The last samples are the last tokens."""
    lengths = [2**30, 2**30, 6, 4]
    total = sum(lengths)
    assert total > PAST and total * 2 > 2**32
    sparse_pair(tmp_path / "x", lengths, code=code, written={total - 10: list(range(1, 11))})
    shared = {"sequence_length": 4, "mode": mode, "document_masks": True, "extra_token": False}
    if order == "native":
        data = open_by_keys(tmp_path / "x", split="whole", **shared)
        assert len(data) == -(-total // 4)
        rows = [len(data) - 4, len(data) - 3, len(data) - 2, len(data) - 1, 0]
        read = data.read(rows)
        assert read.tokens.tolist() == [[0] * 4, [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 0], [0] * 4]
        # The one document that begins inside of a row, at 2^31 + 6.
        assert read.position_ids.tolist() == [[0, 1, 2, 3]] * 2 + [[0, 1, 0, 1]] + [[0, 1, 2, 3]] * 2
        assert data[rows[2]]["tokens"].tolist() == [5, 6, 7, 8]
    else:  # the split has the last two sequences, whose tokens lie behind all others
        data = open_by_keys(tmp_path / "x", order=order, split="test", split_shares="50,0,50", num_samples=2, **shared)
        seen = data.read(range(len(data))).tokens.reshape(-1).tolist()
        assert len(seen) == 8 and set(seen) <= set(range(1, 11))
        assert seen == [token for k in range(2) for token in data[k]["tokens"].tolist()]
    assert IndexedReader(tmp_path / "x", mode=mode).tokens(total - 3, 3).tolist() == [8, 9, 10]


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_one_document_a_row_at_the_end_of_a_large_bin(tmp_path, mode):
    lengths = [2**30, 2**30, 2, 3, 5]
    sparse_pair(tmp_path / "x", lengths, code=4, written={sum(lengths) - 10: list(range(1, 11))})
    data = mdata.open_dataset(tmp_path / "x", sequence_length=4, split="whole", mode=mode, kind=mdata.Document())
    assert data.read([2, 3, 4]).text.tolist() == [[1, 2, 0, 0, 0], [3, 4, 5, 0, 0], [6, 7, 8, 9, 10]]


def test_samples_past_two_to_the_32_of_the_native_order_are_the_twins():
    """Epochs of 2^33 samples and of few, far away ones, up to 2^62 tokens; and the way back."""
    for tokens, length in ((2**33 * 4 + 1, 4), (2**31 * 4096 + 1, 1), (2**62, 4096), (50, 4)):
        order = StreamOrder(tokens, length, key=OrderKey(7, "large"))
        numbers = [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**40, order.samples_per_epoch + 2**33]
        given = {"tokens": tokens, "length": length, "extra": 1, "seed": 7, "corpus_id": "large"}
        starts = [native_start(k, **given) for k in numbers]
        assert order.starts(numbers).tolist() == starts
        assert any(start > 2**32 for start in starts) or tokens == 50
        for k, start in zip(numbers, starts, strict=True):
            assert order.sample_at(k // order.samples_per_epoch, start) == k
    assert len({*order.starts(np.arange(2**32, 2**32 + 11)).tolist()}) == order.samples_per_epoch


def test_two_to_the_31_documents_one_a_row_need_numbers_of_64_bits():
    order = StreamOrder(2**31 + 9, 1, key=OrderKey(7, "large"), extra_token=False)
    starts = order.starts(np.arange(2**31, 2**31 + 3000))
    assert starts.max() < 2**31 + 9 and len({*starts.tolist()}) >= 2990  # of two epochs
    assert order.starts([order.sample_at(3, 2**31 + 8)]).tolist() == [2**31 + 8]


def test_megatrons_plan_counts_in_more_than_64_bits_where_it_must():
    """2^31 sequences of 2^31 - 1 tokens; the request that reaches 2^62 tokens is the first one refused."""
    request = {"first": 0, "stop": 2**31, "seed": 1, "sequence_length": 4096}
    tokens = 2**31 * (2**29 - 1)
    known = plan(tokens, MegatronRequest(num_samples=2**33, **request))
    assert (known.epochs, known.samples) == (1, (tokens - 1) // 4096)
    known = plan(tokens, MegatronRequest(num_samples=known.samples + 1, **request))
    assert (known.epochs, known.separate, known.cut) == (2, True, (tokens - 1) // 4096)
    with pytest.raises(mdata.UsageError, match=r"more than 2\^62 tokens"):
        plan(tokens, MegatronRequest(num_samples=2**50, **request))


def test_types_become_wider_where_numbers_need_it(monkeypatch):
    """Megatron's own limits: int32 documents up to 2^31 - 1 sequences, uint32 rows below 2^32 - 2 samples."""
    made: list[tuple[str, int]] = []
    asked = np.arange

    def noted(*bounds: int, dtype: type) -> np.ndarray:
        made.append((np.dtype(dtype).name, bounds[-1] - (bounds[0] if len(bounds) > 1 else 0)))
        return asked(2, dtype=dtype)

    monkeypatch.setattr(megatron_room.np, "arange", noted)
    for stop in (2**31 - 1, 2**31):
        request = MegatronRequest(first=stop - 2, stop=stop, sequence_length=4, num_samples=1, seed=1)
        megatron_room._documents(request, MegatronPlan(8, 1, False, 1, 1), Mersenne(1))
    for samples in (2**32 - 3, 2**32 - 2):
        megatron_room._shuffle(MegatronPlan(8, 1, False, samples, samples), Mersenne(1))
    assert made == [("int32", 2), ("int64", 2), ("uint32", 2**32 - 3), ("int64", 2**32 - 2)]


def test_draws_above_32_bits_are_numpys():
    """What a shuffle of 2^32 rows or more draws: [0, i] by two words where i needs them."""
    for most in (2**32 - 2, 2**32 - 1, 2**32, 2**32 + 1, 2**33 - 1, 2**40, 2**63 - 2):
        ours, numpys = Mersenne(5), np.random.RandomState(5)
        drawn = [ours.up_to(most) for _ in range(50)]
        assert drawn == numpys.randint(0, most + 1, 50, dtype=np.uint64).tolist(), most
        assert max(drawn) > most // 2


def sparse_lengths(path: Path, count: int, last: list[int]) -> np.ndarray:
    """So many int32 in a file that holds only the last ones; the others are 0 and take no room."""
    lengths = np.memmap(path, "<i4", "w+", shape=(count,))
    lengths[count - len(last) :] = last
    return lengths


LAST = [3, 5, 0, 2, 7, 1, 4, 6]


def test_documents_past_two_to_the_31_in_the_sample_index(tmp_path):
    lengths = sparse_lengths(tmp_path / "lengths", 2**31 + 8, LAST)
    order = np.array([2**31 + 7, 5, 2**31, 2**31 + 1, 0, 2**31 + 4, 2**31 - 1, 2**31 + 2], np.int64)
    rows = np.zeros((6, 2), np.int64)
    fill_sample_index(lengths, order, 4, 1, 1, rows.reshape(-1))
    taken = lengths[order].tolist()
    assert taken == [6, 0, 3, 5, 0, 7, 0, 0]
    places = [(place, offset) for place, length in enumerate(taken) for offset in range(length)]
    assert list(map(tuple, rows.tolist())) == [(0, 0), *(places[4 * k] for k in range(1, 6))]


def test_megatrons_order_at_the_end_of_two_to_the_31_sequences(tmp_path):
    """The whole builder over the last twelve: wide numbers, and beside them the order of a file of twelve."""
    lengths = sparse_lengths(tmp_path / "lengths", 2**31 + 8, LAST)
    shared = {"sequence_length": 4, "num_samples": 20, "seed": 3}
    made = megatron_room.build(lengths, MegatronRequest(first=2**31 - 4, stop=2**31 + 8, **shared))
    assert (made.documents.dtype, made.samples.dtype) == (np.int64, np.int64)
    same = megatron_room.build(np.array(lengths[-12:]), MegatronRequest(first=0, stop=12, **shared))
    assert (made.documents - (2**31 - 4)).tolist() == same.documents.tolist()
    assert made.samples.tolist() == same.samples.tolist()
    assert made.shuffle.tolist() == same.shuffle.tolist()


def test_sentences_past_two_to_the_32_are_mapped(tmp_path):
    """Both builders of rows for BERT and T5: numbers of 64 bits, and the rows of a file that begins there."""
    before = 2**32 - 3
    sizes = sparse_lengths(tmp_path / "sizes", before + 8, LAST)
    boundaries = np.array([before, before + 4, before + 8])
    options = MappingOptions(longest=7, short_probability=0.5)
    key = derive_key("test")
    near = np.array(LAST, np.int32)
    made = megatron_mapping(boundaries, sizes, options=options, seed=1, num_samples=9)
    same = megatron_mapping(boundaries - before, near, options=options, seed=1, num_samples=9)
    assert (made.dtype, same.dtype) == (np.uint64, np.uint32)
    assert (made.astype(np.int64) - [before, before, 0]).tolist() == same.tolist()
    made = native_mapping(boundaries, sizes, options=options, key=key)
    same = native_mapping(boundaries - before, near, options=options, key=key)
    assert made.dtype == np.uint64
    assert (made.astype(np.int64) - [before, before, 0]).tolist() == same.tolist()


def test_an_idx_of_more_than_two_to_the_31_sequences_is_searched(tmp_path):
    """26 GB of tables, of which the last entries are there: documents, cuts and pieces beyond 31 bits."""
    count, documents = 2**31 + 8, 5
    ends = np.cumsum(LAST) * 2
    with (tmp_path / "x.idx").open("wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, count, documents + 1))
        file.seek(34 + 4 * (count - 8))
        file.write(np.array(LAST, "<i4").tobytes())
        file.seek(34 + 4 * count + 8 * (count - 8))
        file.write(np.array([0, *ends[:-1]], "<i8").tobytes())
        file.seek(34 + 12 * count)
        file.write(np.array([0, count - 8, count - 7, count - 3, count - 1, count], "<i8").tobytes())
    (tmp_path / "x.bin").write_bytes(np.arange(sum(LAST), dtype="<u2").tobytes())
    reader = IndexedReader(tmp_path / "x", contiguous=True)
    gatherer = Gatherer([reader])
    first, tokens = gatherer.documents(np.arange(documents))
    assert (first.tolist(), tokens.tolist()) == ([0, 0, 3, 17, 22], [0, 3, 14, 5, 6])
    assert [part.tolist() for part in gatherer.cuts(np.array([0, 16]), np.array([28, 5]))] == [[3, 4], [3, 17, 22, 1]]
    order = np.array([count - 1, count - 8, 0, count - 4], np.int64)
    found = gatherer.pieces(order, np.array([0, 2, 3, 5]), extra=1)
    assert [part.tolist() for part in found] == [[4], [24, 0, 0, 10], [4, 3, 0, 6]]
    assert reader.first_token(count - 4) == 10
