"""Packed samples: rows are those of the twin, every label counts once, no document predicts another's tokens."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import mdata
from mdata import UsageError
from mdata._core import pack_documents
from mdata.array_cache.cache import Cache
from mdata.progress import Silent
from mdata.samples.packed import PackedSamples, PackingRule
from mdata.samples.rows import RowOptions
from tests.helpers.corpora import FileStream, write_pair
from tests.helpers.examples import examples
from tests.reference.packing import pack

DOCUMENTS = st.lists(st.lists(st.integers(0, 12), max_size=3), min_size=1, max_size=20)


def made_of(stream, bounds, *, rule, masks=True, shuffle=True, cache=None) -> PackedSamples:
    options = RowOptions(sequence_length=rule.sequence_length, document_masks=masks, mask_document_ends=True)
    return PackedSamples(stream, bounds, options=options, rule=rule, seed=3, shuffle=shuffle, cache=cache)


def expected_rows(sizes, bounds, rule) -> list[list[tuple[int, int, int]]]:
    """By the twin; windows begin at multiples of their size."""
    first, last = bounds
    kept = [size if first <= d < last else 0 for d, size in enumerate(sizes)]
    if rule.longer == "drop":
        kept = [size if size <= rule.row_length else 0 for size in kept]
    least = min(2, rule.row_length)
    return pack(kept, rule.row_length, window=rule.window, overlap=int(rule.extra_token), least=least)


@examples(150)
@given(DOCUMENTS, st.integers(1, 12), st.booleans(), st.sampled_from(["cut", "drop"]), st.booleans(), st.data())
def test_rows_are_those_of_the_twin(tmp_path_factory, documents, length, extra, longer, shuffle, data):
    sizes = [sum(document) for document in documents]
    first = data.draw(st.integers(0, len(sizes)))
    bounds = data.draw(st.sampled_from([(0, len(sizes)), (first, data.draw(st.integers(first, len(sizes))))]))
    window = data.draw(st.integers(1, 25))
    rule = PackingRule(sequence_length=length, extra_token=extra, longer=longer, window=window)
    rows = expected_rows(sizes, bounds, rule)
    prefix = tmp_path_factory.mktemp("p") / "x"
    write_pair(prefix, documents)
    if not rows:
        with pytest.raises(UsageError, match=r"documents? for sequence length"):
            made_of(FileStream(prefix), bounds, rule=rule, shuffle=shuffle)
        return
    starts = np.cumsum([0, *sizes])
    made = made_of(FileStream(prefix), bounds, rule=rule, shuffle=shuffle)
    assert made.samples_per_epoch == len(rows)
    assert made.num_samples == (None if shuffle else len(rows))
    epoch = made.order.starts(np.arange(len(rows))).tolist()
    assert sorted(epoch) == list(range(len(rows)))
    for k, row in enumerate(epoch):
        sample = made.sample(k)
        text, loss, positions = [], [], []
        for document, offset, count in rows[row]:
            start = int(starts[document]) + offset
            text += range(start, start + count)
            loss += [1.0] * (count - 1) + [0.0]
            positions += range(count)
        padding = length + 1 - len(text)
        after = count if not padding else count + padding
        text += [0] * padding
        positions = [*positions[: len(positions) - count], *range(after)]
        assert (sample["tokens"].tolist(), sample["labels"].tolist()) == (text[:-1], text[1:])
        assert sample["loss_mask"].tolist() == (loss + [0.0] * length)[:length]
        assert sample["position_ids"].tolist() == positions[:length]
        counts = [count for _, _, count in rows[row]]
        edges = [0, *np.cumsum(counts[:-1]).tolist()]
        assert sample["cu_seqlens"].tolist() == edges + [length] * (length + 1 - len(edges))


@examples(50)
@given(DOCUMENTS, st.integers(1, 12))
def test_each_label_of_a_document_counts_once_an_epoch(tmp_path_factory, documents, length):
    sizes = [sum(document) for document in documents]
    assume(max(sizes) > 1)
    prefix = tmp_path_factory.mktemp("p") / "x"
    write_pair(prefix, documents)
    made = made_of(FileStream(prefix), (0, len(sizes)), rule=PackingRule(sequence_length=length), masks=False)
    pairs = []
    for k in range(made.samples_per_epoch):
        sample = made.sample(k)
        assert sample.keys() == {"tokens", "labels", "loss_mask"}
        real = sample["loss_mask"] > 0
        pairs += zip(sample["tokens"][real].tolist(), sample["labels"][real].tolist(), strict=True)
    starts = np.cumsum([0, *sizes]).tolist()
    of_documents = [range(start, stop) for start, stop in pairwise(starts)]
    assert sorted(pairs) == [(token, token + 1) for document in of_documents for token in document[:-1]]


def test_a_longer_range_begins_with_the_windows_of_the_shorter(tmp_path):
    write_pair(tmp_path / "x", [[3 + i % 5] for i in range(40)])
    rule = PackingRule(sequence_length=9, window=8)
    rows = []
    for last in (24, 40):
        made = made_of(FileStream(tmp_path / "x"), (0, last), rule=rule, shuffle=False)
        rows.append([made.sample(k)["tokens"].tolist() for k in range(made.num_samples)])
    assert rows[1][: len(rows[0])] == rows[0]


def test_no_document_is_refused(tmp_path):
    write_pair(tmp_path / "x", [[9], [1], []])
    rule = PackingRule(sequence_length=4, longer="drop")
    with pytest.raises(UsageError, match="no document can be packed\n  found: 3 documents for sequence length 4"):
        made_of(FileStream(tmp_path / "x"), (0, 3), rule=rule)
    with pytest.raises(UsageError, match="found: 1 document for sequence length 4"):
        made_of(FileStream(tmp_path / "x"), (0, 1), rule=rule)


class Heard(Silent):
    def __init__(self):
        self.begun = []

    def begin(self, label, total, **more):
        self.begun.append((label, total))


def test_rows_are_kept_and_found_again(tmp_path):
    write_pair(tmp_path / "x", [[5, 4], [3], [20]] * 10)
    options = mdata.DatasetOptions(sequence_length=8, cache=str(tmp_path / "cache"), kind=mdata.Packed())
    heard = [Heard(), Heard()]
    opened = [mdata.Dataset.from_options(tmp_path / "x", options, progress=listener) for listener in heard]
    assert [listener.begun for listener in heard] == [[("packing", 30)], []]
    assert len(list((tmp_path / "cache").glob("packed-*"))) == 1
    plain = mdata.open_dataset(tmp_path / "x", sequence_length=8, kind=mdata.Packed())
    copies = [*opened, plain, pickle.loads(pickle.dumps(opened[1]))]
    rows = [dataset.read(range(40)) for dataset in copies]
    assert all(np.array_equal(rows[0].text, other.text) for other in rows)
    assert all(np.array_equal(rows[0].loss_mask, other.loss_mask) for other in rows)
    assert {dataset.data_id for dataset in copies} == {plain.data_id}
    shorter = mdata.open_dataset(tmp_path / "x", sequence_length=7, cache=options.cache, kind=mdata.Packed())
    assert shorter.data_id != plain.data_id
    assert len(list((tmp_path / "cache").glob("packed-*"))) == 2


def test_pickled_samples_read_the_same(tmp_path):
    corpus_of = write_pair(tmp_path / "x", [[5], [3], [20]] * 4)
    assert len(corpus_of) == 112
    corpus = mdata.open_corpus(tmp_path / "x")
    cache = Cache(str(tmp_path / "cache"), progress=Heard())
    made = made_of(corpus, (2, 11), rule=PackingRule(sequence_length=6), cache=cache)
    again = pickle.loads(pickle.dumps(made))
    for k in range(30):
        assert made.sample(k)["tokens"].tolist() == again.sample(k)["tokens"].tolist()


def rows_of(lengths, row_length, window, *more):
    ends, documents, offsets, counts = pack_documents(np.array(lengths, np.int64), row_length, window, *more)
    pieces = list(zip(documents.tolist(), offsets.tolist(), counts.tolist(), strict=True))
    return [pieces[start:end] for start, end in zip([0, *ends.tolist()], ends.tolist(), strict=False)]


@examples(300)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=40),
    row_length=st.integers(1, 20),
    window=st.integers(1, 50),
    data=st.data(),
)
def test_equal_to_the_twin(lengths, row_length, window, data):
    overlap, least = data.draw(st.integers(0, row_length - 1)), data.draw(st.integers(1, row_length))
    expected = pack(lengths, row_length, window=window, overlap=overlap, least=least)
    assert rows_of(lengths, row_length, window, overlap, least) == expected


def test_rows_of_many_documents_are_full():
    lengths = np.random.default_rng(1).lognormal(6, 1.2, 20_000).astype(np.int64)
    ends, _, _, counts = pack_documents(lengths, 2048, 1 << 16)
    assert counts.sum() == lengths.sum()
    # No packing needs fewer rows than the tokens fill; this one needs hardly more.
    assert len(ends) * 2048 < 1.001 * lengths.sum() + 2048


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (([1], 0, 1), "row length"),
        (([1], (1 << 26) + 1, 1), "row length"),
        (([1], 4, 0), "window"),
        (([-1], 4, 1), "negative"),
        (([1], 4, 1, 4), "overlap"),
        (([1], 4, 1, 0, 5), "piece"),
    ],
)
def test_what_makes_no_rows_is_refused(bad, told):
    with pytest.raises(ValueError, match=told):
        rows_of(*bad)
