"""Mock data: the same rows for every reader, uniform over the vocabulary, otherwise like a dataset."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import mdata
from mdata import Loader, UsageError
from mdata.dataset.mock_data import LEAST_MASKED_VOCABULARY, MockDataset
from mdata.loader.loader import BatchPlan, describe_places
from mdata.util.random_keys import derive_key


def made(*, vocab_size=1000, sequence_length=64, seed=7) -> MockDataset:
    return MockDataset(vocab_size=vocab_size, sequence_length=sequence_length, seed=seed)


def test_a_row_depends_on_seed_and_number_alone():
    data, numbers = made(), [5, 0, 2**40, 5]
    text = data.read(numbers).text
    for row, number in zip(text, numbers, strict=True):
        assert np.array_equal(data.read([number]).text[0], row)
        assert np.array_equal(data[number]["tokens"], row[:-1]) and np.array_equal(data[number]["labels"], row[1:])
    assert np.array_equal(pickle.loads(pickle.dumps(data)).read(numbers).text, text)
    assert not np.array_equal(text[0], text[1]) and not np.array_equal(made(seed=8).read([5]).text[0], text[0])
    room = data.empty_rows(4)
    assert np.array_equal(data.read(numbers, out=room).text, text) and np.array_equal(room.text, text)
    assert data.read(numbers).unmasked and data[3]["loss_mask"].all()


def test_rows_are_the_philox_stream_of_their_number():
    """By big integers, so that neither numpy's reduction nor an overflow decides what the tokens are."""
    key = derive_key("mock data v1", 7)
    raw = np.random.Philox(key=key.low | key.high << 64, counter=9 << 128).random_raw(65)
    expected = [(int(draw) >> 32) * 1000 >> 32 for draw in raw]
    assert made().read([9]).text[0].tolist() == expected


def test_tokens_are_uniform_over_the_vocabulary():
    text = made(vocab_size=50, sequence_length=4095).read(range(64)).text
    counts = np.bincount(text.ravel(), minlength=50)
    assert len(counts) == 50
    expected = text.size / 50
    assert ((counts - expected) ** 2 / expected).sum() < 100  # chi-squared, 49 degrees: p is 2e-5; the seed is fixed
    largest = made(vocab_size=2**31 - 2).read([1]).text
    assert largest.min() >= 0 and largest.max() > 2**30


def test_ranks_and_resuming_do_not_change_the_stream():
    plan = {"global_batch": 8, "micro_batch": 2, "seed": 7}
    alone = iter(Loader(made(), BatchPlan(**plan)))
    whole = [next(alone) for _ in range(3)]
    later = next(iter(Loader(made(), BatchPlan(**plan), consumed=16)))
    for expected, batch in zip(whole[2], later, strict=True):
        assert np.array_equal(batch.rows.text, expected.rows.text)
    ranks = [next(iter(Loader(made(), BatchPlan(**plan, dp_rank=rank, dp_size=2)))) for rank in range(2)]
    dealt = [batch.samples.tolist() for pair in zip(*ranks, strict=True) for batch in pair]
    assert dealt == [batch.samples.tolist() for batch in whole[0]]


def test_its_identity_is_what_decides_its_rows():
    ids = [made(**one).data_id for one in ({}, {"vocab_size": 999}, {"sequence_length": 65}, {"seed": 8}, {})]
    assert len(set(ids)) == 4 and ids[0] == ids[-1]


def test_it_is_a_dataset_without_end_components_and_tokenizer():
    data = made()
    assert (data.num_samples, data.components, data.tokenizer, data.eod, data.fingerprint) == (
        None,
        (),
        None,
        None,
        None,
    )
    assert (data.vocab_size, data.largest_id, dict(data.tokenizer_files), data.continues) == (1000, 999, {}, None)
    assert not data.valid_sets and not data.test_sets and "no end" in repr(data)
    assert describe_places(data, np.array([3, 4])) == "samples 3, 4"
    assert [len(row["tokens"]) for row in data[2:4]] == [64, 64]
    with pytest.raises(IndexError):
        data.read([-1])
    with pytest.raises(IndexError, match="no end to count from"):
        data[-1]
    with pytest.raises(UsageError, match="out cannot take 2 samples"):
        data.read([0, 1], out=data.empty_rows(3))


KINDS = {
    "document": mdata.Document(),
    "packed": mdata.Packed(document_masks=True),
    "chat": mdata.Chat(),
    "bert": mdata.Bert(),
    "one text": mdata.Bert(head=False),
    "t5": mdata.T5(decoder_length=40),
}


@pytest.mark.parametrize("name", KINDS)
def test_samples_of_other_kinds_have_the_form_of_real_ones(name):
    """Also after pickling, in any order, and through a loader; their data id is their own."""
    data = MockDataset(vocab_size=500, sequence_length=64, seed=7, kind=KINDS[name])
    numbers = np.array([3, 2**40, 0, *range(4, 60)])
    rows = data.read(numbers)
    again = pickle.loads(pickle.dumps(data)).read(numbers[::-1])
    for field, values in rows.fields.items():
        assert np.array_equal(again.fields[field][::-1], values), field
        assert np.array_equal(data[2**40][field], values[1])
    batch = next(iter(Loader(data, BatchPlan(global_batch=4, micro_batch=4))))[0]
    assert np.array_equal(batch.rows["labels"], data.read(batch.samples)["labels"])
    assert data.data_id != made(vocab_size=500).data_id and data.num_samples is None
    if name in ("bert", "one text", "t5"):
        lengths = rows["padding_mask" if name != "t5" else "enc_mask"].sum(1)
        assert lengths.max() > 45 and 0 < np.mean(lengths < 40) < 0.3  # T5's text gets shorter by its spans
        assert 0.1 < rows.loss_mask.sum() / lengths.sum() < (0.35 if name == "t5" else 0.2)
        assert name != "bert" or set(rows["is_random"].tolist()) == {0, 1} == set(np.unique(rows["types"]).tolist())
        assert max(array.max() for array in rows.fields.values()) < 500
    else:
        assert not rows.unmasked and rows.text.max() < 500
    if name == "document":
        counts = rows.loss_mask.sum(1)
        assert counts.min() < 16 < 48 < counts.max() and (rows.loss_mask[:, :-1] >= rows.loss_mask[:, 1:]).all()
    if name in ("packed", "chat"):
        lengths = np.diff(rows.cu_seqlens)
        assert lengths.sum() == 64 * len(numbers) and len(lengths) > 1.5 * len(numbers) and rows.max_seqlen <= 64
        share = rows.loss_mask.mean()
        assert 0.9 < share < 1 if name == "packed" else 0.3 < share < 0.6


def test_masked_mock_samples_need_a_few_tokens():
    for size in (LEAST_MASKED_VOCABULARY, 40):
        for kind in (mdata.Bert(), mdata.T5(decoder_length=60)):
            rows = MockDataset(vocab_size=size, sequence_length=16, seed=1, kind=kind).read(range(20))
            assert all(array.min() >= 0 or name == "labels" for name, array in rows.fields.items())
            assert max(array.max() for array in rows.fields.values()) < size
