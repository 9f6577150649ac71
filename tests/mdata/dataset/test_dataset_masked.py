"""BERT and T5 as kinds of a dataset: the samples of the kinds themselves, mixed, cut by the split, in any loader."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import mdata
from mdata import Tracer, UsageError
from mdata.order.data_split import split_range
from mdata.samples.bert import BertSamples
from mdata.samples.sample_options import MaskingOptions
from mdata.samples.t5 import T5Samples
from tests.helpers.corpora import write_pair
from tests.helpers.masked import make_samples, make_vocabulary
from tests.helpers.open_by_keys import open_by_keys

OPTIONS = {
    "bert": {"kind": "bert", "sequence_length": 32, "vocabulary": make_vocabulary()},
    "t5": {"kind": "t5", "sequence_length": 32, "decoder_length": 24, "vocabulary": make_vocabulary()},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    for name, count in {"a": 40, "b": 25}.items():
        documents = [[(7 * d + 5 * s) % 11 + 1 for s in range(d % 6)] for d in range(count)]
        places = np.arange(sum(map(sum, documents)))
        write_pair(folder / f"{name}_text_sentence", documents, tokens=places * (7 + count) // 3 % 52 + 7)
    words = ["0.7", str(folder / "a_text_sentence"), "0.3", str(folder / "b_text_sentence")]
    mdata.make_blend(words, folder / "mix.json")
    return folder


def opened(folder, base, name="mix.json", **more) -> mdata.Dataset:
    return open_by_keys(folder / name, **{**OPTIONS[base], **more})


def alone(folder, kind, name, *, split="train", shares="100,0,0", **more):
    corpus = mdata.open_corpus(folder / name)
    documents = split_range(shares, split, num_sequences=corpus.num_documents)
    made, own = {"bert": (BertSamples, {}), "t5": (T5Samples, {"decoder_length": 24})}[kind]
    return make_samples(made, corpus, documents, sequence_length=32, vocabulary=make_vocabulary(), **own, **more)


def same(one, other) -> bool:
    return list(one) == list(other) and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_mixture_deals_the_samples_of_its_corpora(folder, kind):
    dataset = opened(folder, kind)
    kinds = [alone(folder, kind, f"{name}_text_sentence") for name in "ab"]
    assert dataset.num_samples is None
    assert [c.samples.samples_per_epoch for c in dataset.components] == [len(kind.rows) for kind in kinds]
    assert [c.num_tokens for c in dataset.components] == [kind.corpus.num_tokens for kind in kinds]
    components, inside = dataset.locate(np.arange(60))
    assert np.bincount(components).tolist() == [42, 18]
    singles = [kinds[c].sample(int(k)) for c, k in zip(components, inside, strict=True)]
    assert all(same(dataset[k], single) for k, single in enumerate(singles))
    numbers = np.random.default_rng(1).permutation(60)
    whole = dataset.read(numbers)
    room = dataset.empty_rows(60)
    assert dataset.read(numbers, out=room).fields is room.fields
    for rows in (whole, room, pickle.loads(pickle.dumps(dataset)).read(numbers)):
        assert all(same({n: a[i] for n, a in rows.fields.items()}, singles[k]) for i, k in enumerate(numbers))
    assert isinstance(whole, mdata.Rows) and len(whole) == 60 and whole.labels is whole["labels"]
    assert whole.tokens is whole["text" if kind == "bert" else "text_enc"] and not whole.unmasked
    assert whole.loss_mask.dtype == np.float32 and np.array_equal(whole.loss_mask, whole["loss_mask"])
    assert np.array_equal(whole.split(3)[1]["labels"], whole.labels[20:40])
    batch = dataset.__getitems__(numbers)
    assert all(same(sample, singles[k]) for sample, k in zip(batch, numbers, strict=True))


@pytest.mark.parametrize("kind", OPTIONS)
def test_validation_is_every_row_of_its_documents_once(folder, kind):
    shares = {"split": "valid", "split_shares": "60,40"}
    dataset = opened(folder, kind, **shares)
    kinds = [alone(folder, kind, f"{n}_text_sentence", split="valid", shares="60,40", order="file") for n in "ab"]
    expected = [samples.sample(k) for samples in kinds for k in range(samples.num_samples)]
    assert len(dataset) == len(expected)
    assert all(same(dataset[k], sample) for k, sample in enumerate(expected))
    one = opened(folder, kind, "b_text_sentence", **shares)
    assert same(one.read(range(len(one))).fields, kinds[1].read(range(kinds[1].num_samples)))
    with pytest.raises(IndexError, match=str(len(dataset))):
        dataset[len(dataset)]


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("split", ["train", "valid"])
def test_megatrons_order_is_that_of_its_datasets(folder, kind, split):
    chosen = {"order": "megatron", "num_samples": 90, "split": split, "split_shares": "60,40"}
    dataset = opened(folder, kind, "a_text_sentence", **chosen)
    made = alone(folder, kind, "a_text_sentence", split=split, shares="60,40", order="megatron", num_samples=90)
    assert len(dataset) == made.num_samples >= 90
    assert all(same(dataset[k], made.sample(k)) for k in range(len(dataset)))
    once = alone(folder, kind, "a_text_sentence", split=split, shares="60,40", order="megatron")
    assert abs(dataset.components[0].samples.samples_per_epoch - len(once.rows)) <= 3


def test_megatrons_order_of_a_mixture(folder):
    dataset = opened(folder, "bert", order="megatron", num_samples=100)
    assert len(dataset) == 100
    components, inside = dataset.locate(np.arange(100))
    whole = dataset.read(range(100))
    for k in range(100):
        expected = dataset.components[components[k]].samples.sample(int(inside[k]))
        sample = dataset[k]
        assert same(dataset.__getitems__([0, k])[1], sample)
        assert sample.pop("dataset_id") == components[k]
        assert same(sample, expected) and same({n: a[k] for n, a in whole.fields.items()}, expected)


def test_the_data_id_covers_what_decides_the_samples(folder):
    masking = MaskingOptions(probability=0.3)
    changes = [{}, {"head": False}, {"short_probability": 0.2}, {"masking": masking}, {"seed": 1}]
    changes += [{"vocabulary": make_vocabulary(pad=None)}, {"sequence_length": 33}]
    made = [opened(folder, "bert", **change) for change in changes] + [opened(folder, "t5")]
    assert len({dataset.data_id for dataset in made}) == len(made)
    assert opened(folder, "bert", masking=MaskingOptions()).data_id == made[0].data_id


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("bert", {"document_masks": True}, "samples of kind 'bert' have no document_masks"),
        ("bert", {"decoder_length": 5}, "samples of kind 'bert' have no decoder_length"),
        ("t5", {"head": False}, "samples of kind 't5' have no head"),
        ("t5", {"decoder_length": None}, "need the decoder's length"),
        ("t5", {"extra_token": False}, "have no extra_token"),
        ("bert", {"kind": "gpt"}, "samples of kind 'gpt' have no vocabulary"),
        ("bert", {"sequence_length": 3}, "no room for text"),
        ("bert", {"split_shares": "0,100"}, "corpus a is shorter than one sample"),
        ("bert", {"split": "test", "split_shares": "99,1"}, "the split 'test' is empty"),
        ("bert", {"vocabulary": None}, "does not say which tokens begin"),
    ],
)
def test_what_does_not_go_together_is_refused(folder, kind, options, said):
    with pytest.raises(UsageError, match=said):
        opened(folder, kind, **options)


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_loader_gives_the_samples_themselves(folder, kind):
    """In the microbatches of its steps, whichever buffers are reused."""
    dataset = opened(folder, kind)
    kept = []
    for _, step in zip(range(4), mdata.Loader(dataset, mdata.BatchPlan(global_batch=6, micro_batch=2)), strict=False):
        kept += step
    assert [len(batch.rows) for batch in kept] == [2] * 12
    assert sorted(number for batch in kept for number in batch.samples.tolist()) == list(range(24))
    for batch in kept:
        assert batch.rows.kind == dataset.options.kind
        for row, number in enumerate(batch.samples.tolist()):
            assert same({name: array[row] for name, array in batch.rows.fields.items()}, dataset[number])
        assert batch.labels is batch.rows["labels"] and np.array_equal(batch.loss_mask, batch.rows["loss_mask"])


def test_flat_keys_change_the_masks_of_their_kind(folder):
    keys = {"mask_probability": 0.3, "max_ngram": 2, "whole_words": False, "longer_ngrams": True, "geometric": False}
    for kind in OPTIONS:
        plain, changed = opened(folder, kind).options.kind.masking, opened(folder, kind, **keys).options.kind.masking
        assert changed == MaskingOptions(probability=0.3, max_ngram=2, whole_words=False, longer_ngrams=True)
        assert opened(folder, kind, mask_probability=plain.probability).data_id == opened(folder, kind).data_id
    assert opened(folder, "t5", max_ngram=2).options.kind.masking.geometric  # as the kind has it
    with pytest.raises(UsageError, match=r"samples of kind 'gpt' have no mask_probability"):
        open_by_keys(folder / "mix.json", sequence_length=32, mask_probability=0.3)


@pytest.mark.parametrize("split", ["train", "whole"])
def test_full_rows_are_rows_of_text_with_masks(folder, split):
    """[CLS], a row of GPT's, [SEP]; in each epoch other rows and masks; the last row of a set may be shorter."""
    full = {"kind": "bert", "head": False, "full_rows": True, "vocabulary": make_vocabulary(), "split": split}
    dataset = open_by_keys(folder / "mix.json", sequence_length=22, **full)
    text = open_by_keys(folder / "mix.json", sequence_length=19, extra_token=False, split=split)
    count = dataset.num_samples or 3 * sum(part.samples.samples_per_epoch for part in dataset.components)
    assert dataset.num_samples == text.num_samples and (dataset.locate([count - 1])[1] > 0).all()
    rows = dataset.read(np.arange(count))
    original = np.where(rows.loss_mask > 0, rows.labels, rows["text"])
    masks, lengths = set(), rows["padding_mask"].sum(1)
    for k in range(count):
        tokens = text[k]["tokens"][: lengths[k] - 2]
        assert original[k].tolist() == [2, *tokens, 3, *[0] * (22 - lengths[k])]
        assert rows.loss_mask[k].sum() in (1, 2) and not rows["types"][k].any()  # of 19 tokens
        masks.add((rows.loss_mask[k].tobytes(), tokens.tobytes()))
    assert set(lengths.tolist()) == {21} if split == "train" else min(lengths) < 21
    assert len(masks) > 0.9 * count
    documents = Tracer(dataset).sample(count - 1).parts
    assert documents == Tracer(text).sample(count - 1).parts


def test_the_same_text_is_masked_otherwise_in_each_epoch(folder):
    """Of rows of sentences, which are the same in each epoch, and so for RoBERTa's dynamic masks."""
    dataset = opened(folder, "bert", "a_text_sentence", head=False)
    samples = dataset.components[0].samples
    size = samples.samples_per_epoch
    rows = samples.read(np.arange(2 * size))
    texts = np.where(rows["loss_mask"] > 0, rows["labels"], rows["text"])
    whole = np.flatnonzero(rows["truncated"] == 0)  # the ends of the others are drawn, too
    masks = [{texts[k].tobytes(): rows["loss_mask"][k].tobytes() for k in whole if k // size == n} for n in (0, 1)]
    assert masks[0].keys() == masks[1].keys() and len(masks[0]) > 20
    assert sum(masks[0][text] != masks[1][text] for text in masks[0]) > 0.6 * len(masks[0])


def test_full_rows_are_refused_where_they_do_not_fit(folder):
    full = {"full_rows": True, "sequence_length": 32}
    with pytest.raises(UsageError, match="full_rows have one text"):
        opened(folder, "bert", **full)
    with pytest.raises(UsageError, match="the megatron order has no full_rows"):
        opened(folder, "bert", head=False, order="megatron", **full)
    with pytest.raises(UsageError, match=r"a is shorter than one full row(.|\n)*tokens, sequence length 99999"):
        opened(folder, "bert", "a_text_sentence", head=False, **{**full, "sequence_length": 99_999})
    with pytest.raises(UsageError, match="no room for text\n  found: 3 tokens\n  expected: 4 or more"):
        opened(folder, "bert", "a_text_sentence", head=False, **{**full, "sequence_length": 3})
    plain = opened(folder, "bert", head=False)
    assert (
        "full_rows" not in plain.identity["bert"]
        and opened(folder, "bert", head=False, **full).data_id != plain.data_id
    )


def test_rows_and_fields_are_not_mixed_up(folder):
    bert, gpt = opened(folder, "bert"), mdata.open_dataset(folder / "mix.json", sequence_length=32)
    with pytest.raises(UsageError, match="out is for rows of text"):
        bert.read([0], out=gpt.empty_rows(1))
    with pytest.raises(UsageError, match="out is for samples of several fields"):
        gpt.read([0], out=bert.empty_rows(1))
