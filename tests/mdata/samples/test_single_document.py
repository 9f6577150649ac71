"""One document per row: which one, how long, and the treatment of longer ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mdata import UsageError
from mdata.samples import single_document as room
from mdata.samples.rows import RowOptions
from mdata.samples.single_document import DocumentSamples
from tests.helpers.corpora import FileStream, write_pair
from tests.helpers.examples import examples
from tests.helpers.open_by_keys import open_by_keys

LENGTHS = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=20)


@examples(100)
@given(LENGTHS, st.integers(1, 10), st.booleans(), st.sampled_from(["cut", "drop"]), st.data())
def test_an_epoch_is_every_document_once(tmp_path_factory, documents, length, shuffle, longer, data):
    sizes = [sum(document) for document in documents]
    first = data.draw(st.integers(0, len(sizes) - 1))
    last = data.draw(st.integers(first + 1, len(sizes)))
    kept = [d for d in range(first, last) if longer == "cut" or 2 <= sizes[d] <= length + 1]
    assume(kept)
    prefix = tmp_path_factory.mktemp("d") / "x"
    write_pair(prefix, documents)
    starts = np.cumsum([0, *sizes])
    options = RowOptions(sequence_length=length, document_masks=True)
    made = DocumentSamples(FileStream(prefix), (first, last), options=options, seed=3, shuffle=shuffle, longer=longer)
    assert made.num_samples == (None if shuffle else len(kept))
    seen = made.documents(np.arange(len(kept))).tolist()
    assert sorted(seen) == kept
    assert shuffle or seen == kept
    for k, document in enumerate(seen):
        row = made.sample(k)
        text = [*range(starts[document], starts[document + 1])][: length + 1]
        padded = text + [0] * (length + 1 - len(text))
        assert (row["tokens"].tolist(), row["labels"].tolist()) == (padded[:-1], padded[1:])
        assert row["loss_mask"].tolist() == [float(i + 1 < len(text)) for i in range(length)]
        assert row["position_ids"].tolist() == list(range(length))
        assert row["cu_seqlens"].tolist() == [0, *[length] * length]


def test_another_epoch_is_another_order(tmp_path):
    write_pair(tmp_path / "x", [[3]] * 40)
    made = DocumentSamples(FileStream(tmp_path / "x"), (0, 40), options=RowOptions(sequence_length=4), seed=3)
    epochs = [tuple(made.documents(np.arange(40) + 40 * epoch).tolist()) for epoch in range(3)]
    assert len(set(epochs)) == 3
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    assert made.epochs(60) == 1.5


def test_blocks_are_counted_across_their_edges(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "_BLOCK", 4)
    monkeypatch.setattr(room, "_COUNTED_AT_ONCE", 8)
    sizes = [i % 5 for i in range(39)]
    write_pair(tmp_path / "x", [[size] for size in sizes])
    options = RowOptions(sequence_length=2)
    made = DocumentSamples(FileStream(tmp_path / "x"), (3, 38), options=options, seed=3, shuffle=False, longer="drop")
    assert made.documents(np.arange(made.num_samples)).tolist() == [d for d in range(3, 38) if 2 <= sizes[d] <= 3]


def test_no_document_that_fits_is_refused(tmp_path):
    write_pair(tmp_path / "x", [[9], [1], []])
    with pytest.raises(UsageError, match=r"no document fits into a row\n  found: 3 documents for sequence length 4"):
        DocumentSamples(
            FileStream(tmp_path / "x"), (0, 3), options=RowOptions(sequence_length=4), seed=1, longer="drop"
        )


def test_without_the_extra_token_the_last_label_is_missing(tmp_path):
    write_pair(tmp_path / "x", [[3], [9], [4], [5]])
    labels = {}
    for extra in (True, False):
        known = {"sequence_length": 4, "split": "whole", "kind": "document", "longer": "drop"}
        data = open_by_keys(tmp_path / "x", **known, extra_token=extra)
        labels[extra] = {int(data[k]["loss_mask"].sum()) for k in range(data.num_samples)}
    assert labels == {True: {2, 3, 4}, False: {2, 3}}
