"""GPT samples of sequences permuted inside blocks, against the stream of the slow twin."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import mdata
from mdata._core import BlockShuffle
from mdata.errors import DamageError, UsageError
from mdata.indexed.gather import Blocks, Gatherer
from mdata.indexed.reader import IndexedReader
from mdata.samples.gpt import GptSamples
from mdata.samples.rows import RowOptions, empty_rows
from mdata.util.random_keys import derive_key
from tests.helpers.corpora import FileStream, write_pair
from tests.helpers.examples import examples
from tests.helpers.open_by_keys import open_by_keys
from tests.reference.native_order import block_order, block_stream

LENGTHS = st.lists(st.integers(0, 9), min_size=3, max_size=40)
BLOCKS = st.integers(1, 12)


def opened(folder, lengths, *, bounds=None, length=4, masks=True, **options):
    write_pair(folder / "x", [[n] for n in lengths])
    stream = FileStream(folder / "x", id="c")
    rows = RowOptions(sequence_length=length, document_masks=masks)
    return GptSamples(stream, bounds or (0, len(lengths)), options=rows, seed=7, **options)


def epoch_stream(gpt, lengths, epoch):
    """(sequence of the corpus, token in it) of every token of an epoch, by the twin."""
    first, last = gpt._sequences
    order = block_order(last - first, gpt.shuffle_block, seed=7, corpus_id="c", epoch=epoch)
    return [(first + s, t) for s, t in block_stream(lengths[first:last], order)]


def drawn(folder, data):
    """Samples of a drawn corpus and range, and the lengths of its sequences."""
    lengths = data.draw(LENGTHS)
    first = data.draw(st.integers(0, len(lengths) - 1))
    last = data.draw(st.integers(first + 1, len(lengths)))
    length, extra = data.draw(st.integers(1, 12)), data.draw(st.booleans())
    assume(sum(lengths[first:last]) >= length + extra)
    block = data.draw(BLOCKS)
    gpt = opened(folder, lengths, bounds=(first, last), length=length, extra_token=extra, shuffle_block=block)
    return gpt, lengths


@examples(150)
@given(st.data())
def test_an_epoch_reads_the_twins_stream_once(tmp_path_factory, data):
    gpt, lengths = drawn(tmp_path_factory.mktemp("g"), data)
    n, epoch = gpt.samples_per_epoch, data.draw(st.integers(0, 3))
    before = np.concatenate(([0], np.cumsum(lengths)))
    stream = epoch_stream(gpt, lengths, epoch)
    assert sorted(stream) == [(s, t) for s in range(*gpt._sequences) for t in range(lengths[s])]
    expected = [int(before[s]) + t for s, t in stream]
    numbers = np.arange(epoch * n, epoch * n + n)
    found = gpt.read(numbers, empty_rows(n, gpt.options))
    inputs = []
    for row, start in enumerate(gpt.order.starts(numbers).tolist()):
        length = gpt.options.sequence_length
        count = length + gpt.order.extra_token
        assert found.text[row, :count].tolist() == expected[start : start + count]
        inputs += expected[start : start + length]
    assert len(set(inputs)) == len(inputs) == n * gpt.options.sequence_length


@examples(100)
@given(st.data())
def test_batches_of_any_epochs_equal_single_samples(tmp_path_factory, data):
    gpt, _ = drawn(tmp_path_factory.mktemp("g"), data)
    numbers = np.array(data.draw(st.lists(st.integers(0, 3 * gpt.samples_per_epoch), min_size=1, max_size=9)))
    places = np.array(data.draw(st.permutations(range(len(numbers)))))
    rows = empty_rows(len(numbers), gpt.options)
    gathered = gpt.gather(numbers, rows.text, out_rows=places)
    cuts = np.split(gathered.cuts[1], gathered.cuts[0][:-1])
    for row, k in enumerate(numbers.tolist()):
        sample = gpt.sample(k)
        assert rows.tokens[places[row]].tolist() == sample["tokens"].tolist()
        starts = sorted({0, *cuts[row].tolist(), gpt.options.sequence_length})
        assert starts == sorted(set(sample["cu_seqlens"].tolist()))
    same = gpt.read(numbers[:1].repeat(3), empty_rows(3, gpt.options), threads=2)
    assert same.text.tolist() == [np.append(gpt.sample(int(numbers[0]))["tokens"], same.text[0, -1]).tolist()] * 3


@examples(100)
@given(st.data())
def test_cu_seqlens_and_positions_tell_sequences_apart(tmp_path_factory, data):
    gpt, lengths = drawn(tmp_path_factory.mktemp("g"), data)
    n, length = gpt.samples_per_epoch, gpt.options.sequence_length
    stream = epoch_stream(gpt, lengths, 1)
    rows = gpt.read(np.arange(n, 2 * n), empty_rows(n, gpt.options))
    expected, positions = [], []
    for row, start in enumerate(gpt.order.starts(np.arange(n, 2 * n)).tolist()):
        owners = [sequence for sequence, _ in stream[start : start + length]]
        begins = [i for i in range(length) if i == 0 or owners[i] != owners[i - 1]]
        expected += [row * length + i for i in begins]
        positions += [i - max(b for b in begins if b <= i) for i in range(length)]
    assert rows.cu_seqlens.tolist() == [*expected, n * length]
    assert rows.position_ids.reshape(-1).tolist() == positions
    assert rows.max_seqlen == np.diff([*expected, n * length]).max()


@examples(100)
@given(st.data())
def test_pieces_and_their_inverse(tmp_path_factory, data):
    gpt, lengths = drawn(tmp_path_factory.mktemp("g"), data)
    if data.draw(st.booleans()):  # the file's own order
        extra, shuffle = gpt.order.extra_token, data.draw(st.booleans())
        gpt = GptSamples(gpt.corpus, gpt._sequences, options=gpt.options, seed=7, extra_token=extra, shuffle=shuffle)
    stop = 2 * gpt.samples_per_epoch if gpt.order.shuffle else gpt.samples_per_epoch
    first = data.draw(st.integers(0, stop))
    readers: dict[int, list[int]] = {}
    before = np.concatenate(([0], np.cumsum(lengths)))
    for k in range(stop):
        pieces = gpt.pieces(k)
        tokens = [int(before[s]) + i for s, start, count in pieces for i in range(start, start + count)]
        sample = gpt.sample(k)
        text = [*sample["tokens"].tolist(), int(sample["labels"][-1])][: len(tokens)]
        assert tokens == text and all(count for _, _, count in pieces)
        for sequence in {s for s, _, _ in pieces}:
            readers.setdefault(sequence, []).append(k)
    for sequence in range(*gpt._sequences):
        expected = [k for k in readers.get(sequence, []) if first <= k < stop]
        assert gpt.samples_of(sequence, first=first, stop=stop) == expected
    with pytest.raises(IndexError, match=f"sequence {gpt._sequences[1]} outside"):
        gpt.samples_of(gpt._sequences[1], first=0, stop=1)


def test_a_block_keeps_its_tokens_and_epochs_differ(tmp_path):
    lengths = [3, 0, 5, 1, 4, 2, 7, 0, 6, 3, 8, 2, 1]
    gpt = opened(tmp_path, lengths, shuffle_block=4)
    orders = {tuple(block_order(13, 4, seed=7, corpus_id="c", epoch=epoch)) for epoch in range(30)}
    assert len(orders) == 30
    assert all({*order[:4]} == {0, 1, 2, 3} and order[12:] == (12,) for order in orders)
    assert gpt.corpus.gatherer.block_place(gpt._blocks(0), 12) == (sum(lengths[:12]), 1)


def test_every_order_of_a_block_is_as_likely():
    counts = np.zeros((5, 5))
    for epoch in range(2000):
        for place, sequence in enumerate(block_order(5, 5, seed=1, corpus_id="x", epoch=epoch)):
            counts[place, sequence] += 1
    chi2 = ((counts - 400) ** 2 / 400).sum()
    assert 2 < chi2 < 40  # 16 degrees of freedom


@examples(60)
@given(st.data())
def test_blocks_cross_shards_and_threads_change_nothing(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("s")
    lengths, readers = [], []
    for shard in range(3):
        part = data.draw(st.lists(st.integers(0, 9), max_size=9))
        write_pair(folder / str(shard), [[n] for n in part])
        readers.append(IndexedReader(folder / str(shard)))
        lengths += part
    total = sum(lengths)
    assume(total)
    block = data.draw(BLOCKS)
    gatherer = Gatherer(readers)
    blocks = Blocks(gatherer.block_shuffle((0, len(lengths)), block), (5, 9))
    ends, first, count, cuts = gatherer.block_pieces(blocks, np.array([0]), counts=np.array([total]), inputs=total)
    before = np.concatenate(([0], np.cumsum(lengths))).tolist()
    assert sorted(zip(first.tolist(), count.tolist(), strict=True)) == [
        (before[i], n) for i, n in enumerate(lengths) if n
    ]
    assert ends.tolist() == [len(first)]
    assert cuts[1].tolist() == np.cumsum(count)[:-1].tolist()
    starts, counts = np.arange(total), np.minimum(3, total - np.arange(total))
    alone = gatherer.block_pieces(blocks, starts, counts=counts, inputs=3)
    many = gatherer.block_pieces(blocks, np.tile(starts, 2000), counts=np.tile(counts, 2000), inputs=3, threads=3)
    assert all((np.tile(alone[i], 2000) == many[i]).all() for i in (1, 2))
    tokens = [t for f, c in zip(first.tolist(), count.tolist(), strict=True) for t in range(f, f + c)]
    assert [tokens[i] for i in range(total)] == alone[1][np.concatenate(([0], alone[0][:-1]))].tolist()


def test_large_blocks_and_many_of_them_equal_the_twin(tmp_path):
    lengths = np.random.default_rng(1).integers(0, 5, 30_000).tolist()
    before = np.concatenate(([0], np.cumsum(lengths)))
    write_pair(tmp_path / "x", [[n] for n in lengths])
    gatherer = Gatherer([IndexedReader(tmp_path / "x")])
    key = derive_key("native blocks v1", 7, "c", 2)
    for block in (1, 2, 17, 5000, 30_000, 1 << 20):
        blocks = Blocks(gatherer.block_shuffle((0, 30_000), block), (key.low, key.high))
        total = np.array([before[-1]])
        _, first, count, _ = gatherer.block_pieces(blocks, total * 0, counts=total, inputs=1)
        order = block_order(30_000, block, seed=7, corpus_id="c", epoch=2)
        expected = [(int(before[s]), lengths[s]) for s in order if lengths[s]]
        assert list(zip(first.tolist(), count.tolist(), strict=True)) == expected


def test_known_answers(tmp_path):
    """These freeze version 1 of the blocks."""
    order = block_order(20, 8, seed=1234, corpus_id="abc", epoch=3)
    assert order == [7, 6, 2, 5, 1, 0, 3, 4, 14, 10, 15, 13, 11, 9, 12, 8, 16, 17, 19, 18]  # fmt: skip
    gpt = opened(tmp_path, [3, 0, 5, 1, 4, 2, 7, 0, 6, 3, 8, 2, 1], shuffle_block=4)
    assert [t for k in (25, 26) for t in gpt.sample(k)["tokens"].tolist()] == [32, 33, 34, 35, 15, 16, 17, 18]


def test_pickled_it_stays_the_same(tmp_path):
    write_pair(tmp_path / "x", [[n] for n in (3, 0, 5, 1, 4, 2, 7, 0, 6, 3, 8, 2, 1)])
    data = mdata.open_dataset(tmp_path / "x", sequence_length=4, order=mdata.NativeOrder(shuffle_block=3))
    again = pickle.loads(pickle.dumps(data))
    assert again.components[0].samples.shuffle_block == 3
    assert all((again[k]["tokens"] == data[k]["tokens"]).all() for k in range(40))


def test_the_option_is_part_of_the_identity_only_where_it_is_used(tmp_path):
    write_pair(tmp_path / "x", [[n] for n in range(30)])
    plain = mdata.open_dataset(tmp_path / "x", sequence_length=4)
    blocks = mdata.open_dataset(tmp_path / "x", sequence_length=4, order=mdata.NativeOrder(shuffle_block=5))
    assert "shuffle_block" not in plain.identity and blocks.identity["shuffle_block"] == 5
    assert plain.data_id != blocks.data_id
    assert any((plain[k]["tokens"] != blocks[k]["tokens"]).any() for k in range(20))
    shares = {"split": "valid", "split_shares": "50,50", "sequence_length": 4}
    valid, in_order = open_by_keys(tmp_path / "x", **shares, shuffle_block=5), open_by_keys(tmp_path / "x", **shares)
    assert all((valid[k]["tokens"] == in_order[k]["tokens"]).all() for k in range(len(valid)))


@pytest.mark.parametrize(
    "options", [{"shuffle_block": -1}, {"shuffle_block": 2**20 + 1}, {"shuffle_block": 2, "kind": "packed"}]
)
def test_what_means_nothing_is_refused(tmp_path, options):
    with pytest.raises(UsageError, match=f"shuffle_block {options['shuffle_block']}"):
        mdata.DatasetOptions.from_keys({"sequence_length": 4, **options})
    with pytest.raises(UsageError, match="the megatron order has no shuffle_block"):
        mdata.DatasetOptions.from_keys({"sequence_length": 4, "order": "megatron", "shuffle_block": 2})


@pytest.mark.parametrize("block, first, last", [(0, 0, 3), (2**20 + 1, 0, 3), (2, -1, 3), (2, 2, 1), (2, 0, 4)])
def test_the_core_refuses_blocks_and_ranges_that_cannot_be(tmp_path, block, first, last):
    write_pair(tmp_path / "x", [[2], [3], [4]])
    with pytest.raises((ValueError, IndexError), match="sequences"):
        BlockShuffle(Gatherer([IndexedReader(tmp_path / "x")])._index, first, last, block)


@pytest.mark.parametrize("start, count", [(1, 1), (2, 8), (9, 1), (-1, 2), (3, -1)])
def test_tokens_outside_of_the_range_are_refused(tmp_path, start, count):
    write_pair(tmp_path / "x", [[2], [3], [4]])
    gatherer = Gatherer([IndexedReader(tmp_path / "x")])
    blocks = Blocks(gatherer.block_shuffle((1, 3), 2), (1, 2))
    with pytest.raises(IndexError, match="tokens"):
        gatherer.block_pieces(blocks, np.array([start]), counts=np.array([count]), inputs=1)
    with pytest.raises(IndexError, match="sequence"):
        gatherer.block_place(blocks, 0)


@pytest.mark.parametrize("where, value", [(34, -1), (34, 4), (38, 2**31 - 1), (34 + 16 + 8, 99), (34 + 16 + 8, 3)])
def test_a_wrong_table_is_damage(tmp_path, where, value):
    write_pair(tmp_path / "x", [[2], [3], [4], [5]], code=8)
    gatherer = Gatherer([IndexedReader(tmp_path / "x", contiguous=True)])
    idx = tmp_path / "x.idx"
    content = bytearray(idx.read_bytes())
    size = 4 if where < 50 else 8
    content[where : where + size] = value.to_bytes(size, "little", signed=True)
    idx.write_bytes(content)
    gatherer = Gatherer([IndexedReader(tmp_path / "x", contiguous=True)])
    with pytest.raises(DamageError, match=r"x\.idx: bad (length|pointer) of sequence"):
        blocks = Blocks(gatherer.block_shuffle((0, 4), 1), (1, 2))
        gatherer.block_pieces(blocks, np.array([0]), counts=np.array([14]), inputs=1)


def test_without_shuffling_blocks_are_none(tmp_path):
    gpt = opened(tmp_path, [3, 4, 5, 2], shuffle=False, shuffle_block=2)
    assert gpt.shuffle_block == 0
    assert [t for k in range(gpt.num_samples) for t in gpt.sample(k)["tokens"].tolist()][:13] == list(range(13))


@pytest.mark.parametrize(
    "read",
    [
        lambda gpt: gpt.runs(0),
        lambda gpt: gpt.samples_of(0, first=0, stop=2),
        lambda gpt: gpt.gather(np.array([0]), np.empty((1, 4), np.int32)),
    ],
    ids=["runs", "samples of a sequence", "gather"],
)
def test_a_place_outside_of_the_index_is_damage(tmp_path, monkeypatch, read):
    """An altered manifest gives more sequences than the index has; the extension says so with an IndexError."""
    gpt = opened(tmp_path, [3, 5, 4, 2, 7], shuffle_block=4)

    def outside(*_: object, **__: object) -> None:
        raise IndexError("sequence 9 of 5")

    for name in ("block_place", "block_pieces"):
        monkeypatch.setattr(Gatherer, name, outside)
    with pytest.raises(DamageError, match=r"are not laid out as its manifest says(.|\n)*found: sequence 9 of 5"):
        read(gpt)
