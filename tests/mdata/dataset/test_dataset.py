"""Datasets over corpora whose tokens encode their position."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata import DatasetOptions, UsageError
from mdata.loader.loader import BatchPlan, collate
from mdata.order.data_split import parse_split
from tests.helpers.corpora import write_pair
from tests.helpers.examples import examples

SIZES = {"a": 400, "b": 900}
BASE = {"a": 0, "b": 10_000}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Corpora a and b; token = position, in b plus 10,000. Documents of 10 tokens. mix.json is 0.7 a, 0.3 b."""
    folder = tmp_path_factory.mktemp("dataset")
    for name, size in SIZES.items():
        write_pair(folder / name, [[10]] * (size // 10), tokens=np.arange(size) + BASE[name])
    mdata.make_blend(["0.7", str(folder / "a"), "0.3", str(folder / "b")], folder / "mix.json")
    return folder


def opened(folder, name="mix.json", **options) -> mdata.Dataset:
    return mdata.Dataset.from_options(folder / name, DatasetOptions.from_keys({"sequence_length": 16, **options}))


def test_a_training_sample_is_a_run_of_its_component(folder):
    dataset = opened(folder)
    assert dataset.num_samples is None
    components, inside = dataset.locate(np.arange(300))
    for sample in range(300):
        row = dataset[sample]
        assert [row[name].dtype for name in ("tokens", "labels", "loss_mask")] == [np.int64, np.int64, np.float32]
        start = int(row["tokens"][0])
        assert row["tokens"].tolist() == list(range(start, start + 16))
        assert row["labels"].tolist() == list(range(start + 1, start + 17))
        assert row["loss_mask"].tolist() == [1.0] * 16
        name = dataset.components[components[sample]].name
        assert BASE[name] <= start <= BASE[name] + SIZES[name] - 17
        expected = dataset.components[components[sample]].samples.sample(int(inside[sample]))
        assert row["tokens"].tolist() == expected["tokens"].tolist()


def test_a_kind_and_an_order_may_be_given_by_name(folder):
    for kind, order in (("document", "native"), ("packed", "native"), ("gpt", "megatron")):
        by_name = mdata.open_dataset(folder / "a", sequence_length=16, kind=kind, order=order)
        keys = {"sequence_length": 16, "kind": kind, "order": order}
        assert by_name.options == DatasetOptions.from_keys(keys)
        assert by_name.data_id == opened(folder, "a", **keys).data_id
    for wrong, said in (("t5", "decoder_length=128"), ("gtp", "no kind of samples 'gtp'")):
        with pytest.raises(UsageError, match=said):
            mdata.open_dataset(folder / "a", sequence_length=16, kind=wrong)
    with pytest.raises(UsageError, match="no order 'nativ'"):
        mdata.open_dataset(folder / "a", sequence_length=16, order="nativ")


def test_shares_are_met(folder):
    components, inside = opened(folder).locate(np.arange(1000))
    assert np.bincount(components).tolist() == [700, 300]
    for component in (0, 1):
        assert inside[components == component].tolist() == list(range(np.count_nonzero(components == component)))


def test_another_mixture_does_not_reshuffle_a_corpus(folder):
    alone = opened(folder, "a")
    mixed = opened(folder)
    components, inside = mixed.locate(np.arange(200))
    for sample in np.flatnonzero(components == 0)[:50]:
        assert mixed[int(sample)]["tokens"].tolist() == alone[int(inside[sample])]["tokens"].tolist()


def test_validation_is_each_token_once_in_file_order(folder):
    dataset = opened(folder, split="valid", split_shares="80,20")
    tokens, labels = [], []
    for sample in range(len(dataset)):
        row = dataset[sample]
        real = row["loss_mask"] > 0
        tokens += row["tokens"][real].tolist()
        labels += row["labels"][real].tolist()
    parts = [range(BASE[n] + SIZES[n] * 8 // 10, BASE[n] + SIZES[n]) for n in "ab"]
    assert tokens == [token for part in parts for token in part[:-1]]
    assert labels == [token for part in parts for token in part[1:]]
    with pytest.raises(IndexError, match=str(len(dataset))):
        dataset[len(dataset)]
    assert dataset[-1]["tokens"].tolist() == dataset[len(dataset) - 1]["tokens"].tolist()
    with pytest.raises(IndexError, match=str(-len(dataset) - 1)):
        dataset[-len(dataset) - 1]


def test_whole_is_everything(folder):
    dataset = opened(folder, split="whole")
    assert [component.num_tokens for component in dataset.components] == [400, 900]
    assert sum(dataset[k]["loss_mask"].sum() for k in range(len(dataset))) == 399 + 899


def test_training_and_validation_do_not_share_tokens(folder):
    train = opened(folder, split="train", split_shares="80,20")
    limits = {n: BASE[n] + SIZES[n] * 8 // 10 for n in "ab"}
    for sample in range(200):
        labels = train[sample]["labels"]
        name = "a" if labels[0] < 10_000 else "b"
        assert labels.max() < limits[name]


def test_a_dataset_can_be_pickled(folder):
    dataset = opened(folder)
    twin = pickle.loads(pickle.dumps(dataset))
    assert twin.data_id == dataset.data_id
    assert all(np.array_equal(dataset[k]["tokens"], twin[k]["tokens"]) for k in range(40))


def test_data_id_covers_what_decides_the_order(folder):
    base = opened(folder)
    changes = [{"seed": 1}, {"sequence_length": 17}, {"split": "whole"}, {"split_shares": "90,10"}, {"name": "a"}]
    others = [opened(folder, **change) for change in changes]
    assert len({dataset.data_id for dataset in [base, *others]}) == 6
    assert base.data_id == opened(folder, split_shares="1").data_id
    fields = {name for name, value in others[0].identity.items() if value != base.identity[name]}
    assert fields == {"seed"}


def test_the_order_does_not_change_between_versions_of_this_code(folder):
    """If this fails, runs cannot be resumed: the order's or the blend's version must be raised."""
    starts = [int(opened(folder)[k]["tokens"][0]) for k in (0, 1, 2, 3, 4, 1000)]
    assert (starts, opened(folder).data_id) == (
        [2, 10788, 242, 306, 10436, 364],
        "3d184f3ba478307021ea548b5c7b0f7f70462fca7168bb7370318ea08f9393b1",
    )


def test_words_open_the_same_data(folder):
    dataset = mdata.open_dataset(f"7 {folder / 'a'} 3 {folder / 'b'}", sequence_length=16)
    assert dataset.data_id == opened(folder).data_id


def test_unknown_facts_of_bare_pairs(folder):
    dataset = opened(folder)
    assert [c.name for c in dataset.components] == ["a", "b"]
    facts = (dataset.fingerprint, dataset.vocab_size, dataset.eod, dataset.largest_id, dataset.text_bytes)
    assert facts == (None,) * 5
    assert dataset.tokenizer_files == {}
    assert dataset.num_corpus_tokens == 1300


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"sequence_length": 400},
            ["corpus a is shorter than one sample", "400 tokens in 40 sequences", "= 401 tokens"],
        ),
        ({"split_shares": "0,100"}, ["corpus a is shorter than one sample", "0 tokens in 0 sequences"]),
        (
            {"split": "test", "split_shares": "99,1"},
            ["the split 'test' is empty", "'99,1' of a, b", "a share of 0 if it is not used"],
        ),
        ({"split": "training"}, ["no split 'training'", "train, valid, test, whole"]),
        ({"split_shares": "x"}, ["the split string cannot be used"]),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(folder, changes, words):
    with pytest.raises(UsageError) as caught:
        opened(folder, **changes)
    for word in words:
        assert word in str(caught.value)


def test_a_dataset_without_end_has_no_length(folder):
    with pytest.raises(TypeError, match="has no end"):
        len(opened(folder))


def test_parse_split():
    assert parse_split("8,1,1") == pytest.approx((0.8, 0.1, 0.1))


PLANS = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))


@examples(15)
@given(plan=PLANS, start=st.integers(0, 3))
def test_the_stream_is_the_same_for_any_ranks_and_any_start(folder, plan, start):
    dp_size, micro_batch, prefetch = plan
    dataset = opened(folder)
    global_batch = 24
    expected = [set(range(step * 24, step * 24 + 24)) for step in range(5)]
    steps = [[] for _ in range(5 - start)]
    for dp_rank in range(dp_size):
        sizes = BatchPlan(global_batch, micro_batch, dp_rank=dp_rank, dp_size=dp_size, seed=5)
        loader = mdata.Loader(dataset, sizes, consumed=start * global_batch, prefetch=prefetch)
        for step, batches in enumerate(itertools.islice(loader, 5 - start)):
            assert len(batches) == 24 // dp_size // micro_batch
            for batch in batches:
                assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == (micro_batch, 16)
                steps[step] += batch.samples.tolist()
                for place, sample in enumerate(batch.samples):
                    assert batch.tokens[place].tolist() == dataset[int(sample)]["tokens"].tolist()
    assert [set(step) for step in steps] == expected[start:]
    assert all(len(step) == 24 for step in steps)


def test_collate_keeps_the_order(folder):
    dataset = opened(folder, split="whole")
    batch = collate(dataset, [5, 2, 60])
    assert batch.samples.tolist() == [5, 2, 60]
    for place, sample in enumerate((5, 2, 60)):
        row = dataset[sample]
        assert all(np.array_equal(getattr(batch, name)[place], row[name]) for name in row)
