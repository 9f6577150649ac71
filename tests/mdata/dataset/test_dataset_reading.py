"""The effect of a dataset's options on its rows, its identity and its ways of reading, in both orders."""

from __future__ import annotations

import gc
import itertools
import os
import pickle
import weakref

import numpy as np
import pytest

import mdata
from mdata import DamageError, DatasetOptions, UsageError
from mdata.loader.loader import BatchPlan, collate, collate_step
from mdata.samples.rows import Rows
from tests.helpers.corpora import write_pair
from tests.helpers.open_by_keys import open_by_keys

EOD = 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Corpora a (400 tokens) and b (900) of documents of 1 to 20 tokens that end with eod; mix.json is 0.7 a, 0.3 b."""
    folder = tmp_path_factory.mktemp("dataset")
    for name, size, seed in (("a", 400, 1), ("b", 900, 2)):
        random = np.random.default_rng(seed)
        ends = np.unique(np.append(np.cumsum(random.integers(1, 21, size)), size))
        ends = ends[ends <= size]
        tokens = np.arange(size) + (10_000 if name == "b" else 100)
        tokens[ends - 1] = EOD
        write_pair(folder / name, [[length] for length in np.diff(ends, prepend=0).tolist()], tokens=tokens)
    mdata.make_blend(["0.7", str(folder / "a"), "0.3", str(folder / "b")], folder / "mix.json")
    return folder


def opened(folder, name="mix.json", **options) -> mdata.Dataset:
    return open_by_keys(folder / name, **{"sequence_length": 16, "eod": EOD, **options})


KINDS = [
    {"name": "a", "document_masks": True},
    {"name": "a", "split": "whole", "eod_mask_loss": True},
    {"name": "mix.json", "document_masks": True},
    {"name": "mix.json", "eod_mask_loss": True, "mode": "pread"},
    {"name": "mix.json", "reset_position_ids": True, "extra_token": False, "threads": 2},
    {"name": "mix.json", "kind": "document"},
    {"name": "mix.json", "kind": "packed"},
    {"name": "mix.json", "kind": "packed", "longer": "drop", "document_masks": True},
    {"name": "mix.json", "kind": "document", "longer": "drop", "document_masks": True},
    {"name": "mix.json", "split": "valid", "split_shares": "50,50", "document_masks": True},
    {"name": "a", "order": "megatron", "num_samples": 60, "document_masks": True, "pad": 3},
    {"name": "b", "order": "megatron", "num_samples": 90, "eod_mask_loss": True, "reset_position_ids": True},
    {"name": "b", "order": "megatron", "split": "valid", "split_shares": "50,50", "keep_partial": True},
]


@pytest.mark.parametrize("options", [*KINDS, {"name": "a", "kind": "packed", "document_masks": True}], ids=str)
def test_no_samples_are_rows_of_none(folder, options):
    dataset = opened(folder, **options)
    rows = dataset.read([])
    assert all(len(array) == 0 for array in rows.fields.values()) and rows.text.shape == (0, 17)
    assert dataset[0:0] == []


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_many_at_once_are_what_single_ones_are(folder, options):
    dataset = opened(folder, **options)
    count = min(60, dataset.num_samples or 60)
    samples = np.random.default_rng(1).permutation(count)
    single = [dataset[int(k)] for k in samples]
    rows = dataset.read(samples)
    again = dataset.read(samples, out=dataset.empty_rows(count))
    names = [name for name in single[0] if name not in ("cu_seqlens", "max_seqlen", "attention_mask")]
    for name, made in itertools.product(names, (rows, again)):
        assert np.array_equal(getattr(made, name), np.stack([row[name] for row in single])), name
    if rows.cu_seqlens is not None:
        starts = {i * 16 + start for i, row in enumerate(single) for start in row["cu_seqlens"].tolist()}
        assert rows.cu_seqlens.tolist() == again.cu_seqlens.tolist() == sorted(starts)
        assert rows.max_seqlen == max(row["max_seqlen"] for row in single)
    buffer = np.full((count, 17), -5, np.int64)
    assert dataset.read(samples, out=buffer).text is buffer
    assert np.array_equal(buffer, rows.text)


def told(rows: Rows) -> dict[str, object]:
    """Everything that rows tell, as lists."""
    found = {name: array.tolist() for name, array in rows.fields.items()}
    return found | {
        "max_seqlen": rows.max_seqlen,
        "cu_seqlens": None if rows.cu_seqlens is None else rows.cu_seqlens.tolist(),
    }


@pytest.mark.parametrize("options", [{"name": "a"}, *KINDS], ids=str)
@pytest.mark.parametrize("together", [1, 3, 6])
def test_microbatches_of_a_step_are_what_each_is_by_itself(folder, options, together, monkeypatch):
    monkeypatch.setattr("mdata.loader.loader._TOKENS_TOGETHER", together * 5 * 16)
    dataset = opened(folder, **options)
    step = np.random.default_rng(3).permutation(min(20, dataset.num_samples or 20) // 5 * 5).reshape(-1, 5)
    batches = list(collate_step(dataset, step))
    assert len(batches) == len(step)
    for samples, batch in zip(step, batches, strict=True):
        assert batch.samples.tolist() == samples.tolist()
        assert told(batch.rows) == told(collate(dataset, samples).rows)


@pytest.mark.parametrize(
    "options", [{"name": "a"}, {"name": "a", "extra_token": False}, {"name": "mix.json"}, *KINDS], ids=str
)
def test_rows_that_need_no_mask_say_so(folder, options):
    """They may be silent where a rule by value might have masked something; they must not say it of others."""
    dataset = opened(folder, **options)
    count = min(60, dataset.num_samples or 60)
    rows = dataset.read(np.arange(count))
    if rows.unmasked:
        assert (rows.loss_mask == 1).all()
    by_place = "order" not in options and not options.get("eod_mask_loss") and options.get("kind") != "packed"
    assert rows.unmasked == (by_place and bool((rows.loss_mask == 1).all()))


@pytest.mark.parametrize("options", [{}, {"document_masks": True}, {"split": "whole", "document_masks": True}], ids=str)
def test_what_rows_tell_is_of_their_own_reading_though_their_memory_is_read_into_again(folder, options):
    dataset = opened(folder, "a", **options)
    room = dataset.empty_rows(5)
    last = (dataset.num_samples or 60) - 5
    expected = [told(dataset.read(np.arange(first, first + 5))) for first in (0, last)]
    rows = [dataset.read(np.arange(first, first + 5), out=room) for first in (0, last)]  # the last one may be padded
    for row, wanted in zip(rows, expected, strict=True):
        assert told(row) | {"tokens": 0, "labels": 0} == wanted | {"tokens": 0, "labels": 0}


def test_room_that_nothing_was_read_into_tells_nothing(folder):
    with pytest.raises(ValueError, match="nothing has been read into these rows"):
        opened(folder, "a").empty_rows(2).loss_mask  # noqa: B018


BATCHED = [
    *KINDS,
    {"name": "a"},
    {"name": "mix.json", "extra_token": False},
    {"name": "b", "create_attention_mask": True},
    {"name": "mix.json", "order": "megatron", "num_samples": 60},
]


@pytest.mark.parametrize("options", BATCHED, ids=str)
def test_a_batch_of_a_data_loader_is_what_single_samples_are(folder, options):
    dataset = opened(folder, **options)
    samples = np.random.default_rng(2).permutation(min(40, dataset.num_samples or 40)).tolist()
    batch = dataset.__getitems__(samples)
    assert len(batch) == len(samples)
    for k, sample in zip(samples, batch, strict=True):
        assert list(sample) == list(dataset[k])
        for name, array in dataset[k].items():
            assert (sample[name].dtype, sample[name].shape) == (array.dtype, array.shape), name
            assert np.array_equal(sample[name], array), name
    if dataset.num_samples is None:
        with pytest.raises(IndexError, match="-1"):
            dataset.__getitems__([0, -1])
    else:
        assert np.array_equal(dataset.__getitems__([0, -1])[1]["tokens"], dataset[-1]["tokens"])
        with pytest.raises(IndexError, match=str(dataset.num_samples)):
            dataset.__getitems__([0, -dataset.num_samples - 1])


def test_rows_that_span_epochs_are_freed_when_they_are_dropped(folder):
    """Not at the next collection: a reader that keeps some batches for a while needs new memory for the others."""
    dataset = opened(folder, "b")
    per_epoch = dataset.components[0].samples.samples_per_epoch
    gc.disable()
    try:
        text = weakref.ref(dataset.read([per_epoch - 1, per_epoch]).text)
        assert text() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("options", [{}, {"document_masks": True}, {"eod_mask_loss": True, "mode": "pread"}], ids=str)
def test_one_epoch_of_one_corpus_is_read_by_one_call(folder, options):
    dataset = opened(folder, "b", **options)
    kind = dataset.components[0].samples
    per_epoch = kind.order.samples_per_epoch
    for first, count, threads in ((0, 30, 1), (3 * per_epoch, per_epoch, 2)):
        samples = np.arange(first, first + count)[::-1].copy()
        rows = kind.read(samples, dataset.empty_rows(count), threads=threads)
        single = [dataset[int(k)] for k in samples]
        names = [name for name in single[0] if name not in ("cu_seqlens", "max_seqlen")]
        assert all(np.array_equal(getattr(rows, name), np.stack([row[name] for row in single])) for name in names)
        if "document_masks" in options:
            starts = {i * 16 + start for i, row in enumerate(single) for start in row["cu_seqlens"].tolist()}
            assert rows.cu_seqlens.tolist() == sorted(starts)
            assert rows.max_seqlen == max(row["max_seqlen"] for row in single)
    for several in ([per_epoch - 1, per_epoch], [5, -1], []):
        assert kind.read(np.array(several, np.int64), dataset.empty_rows(len(several))) is None


def test_documents_are_told_apart_by_their_place_not_by_an_id(folder):
    dataset = opened(folder, "a", document_masks=True, eod=None)
    for k in range(60):
        row = dataset[k]
        after_eod = np.flatnonzero(row["tokens"][:-1] == EOD) + 1
        assert row["cu_seqlens"].tolist()[: len(after_eod) + 2] == [0, *after_eod.tolist(), 16]
        assert np.flatnonzero(row["position_ids"] == 0).tolist() == [0, *after_eod.tolist()]
        assert row["max_seqlen"] == np.diff(row["cu_seqlens"]).max()
        assert row["loss_mask"].tolist() == [1.0] * 16


def test_loss_and_masks_by_the_end_of_a_document(folder):
    options = {"eod_mask_loss": True, "reset_attention_mask": True, "create_attention_mask": True}
    dataset = opened(folder, "a", **options)
    for k in range(30):
        row = dataset[k]
        assert np.array_equal(row["loss_mask"] == 0, row["tokens"] == EOD)
        document = np.cumsum(row["tokens"] == EOD) - (row["tokens"] == EOD)
        seen = np.tri(16, dtype=bool) & (document[:, None] == document[None, :])
        assert np.array_equal(row["attention_mask"][0], ~seen)
    by_place = opened(folder, "a", document_masks=True, create_attention_mask=True)
    assert all(np.array_equal(by_place[k]["attention_mask"], dataset[k]["attention_mask"]) for k in range(30))


def test_options_that_are_not_used_change_no_identity(folder):
    base = opened(folder, eod=None)
    assert set(base.identity) == {
        "blend", "blend_algorithm", "order", "sample_kind", "seed", "sequence_length", "extra_token", "split",
        "split_shares",
    }  # fmt: skip
    for options in ({"mode": "pread"}, {"threads": 3}, {"num_samples": 5}):
        assert opened(folder, eod=None, **options).data_id == base.data_id
    # The last partial sample is kept of validation alone.
    for split in ("train", "test"):
        theirs = {"order": "megatron", "split": split, "split_shares": "50,0,50"}
        twins = [opened(folder, "a", **theirs, keep_partial=keep) for keep in (False, True)]
        assert twins[0].data_id == twins[1].data_id and len(twins[0]) == len(twins[1])


def test_data_id_covers_every_option_that_decides(folder):
    native = [{}, {"document_masks": True}, {"eod_mask_loss": True}, {"reset_position_ids": True}]
    native += [{"reset_attention_mask": True}, {"create_attention_mask": True}, {"extra_token": False}, {"eod": 8}]
    native += [{"kind": "document"}, {"kind": "document", "longer": "drop"}, {"kind": "packed"}]
    megatron = [{}, {"num_samples": 30}, {"pad": 3}, {"pad": EOD, "allow_ambiguous_pad": True}]
    megatron += [{"split": "whole"}, {"split": "whole", "keep_partial": True}]
    datasets = [opened(folder, "a", **options) for options in native]
    datasets += [opened(folder, "a", order="megatron", **options) for options in megatron]
    assert len({dataset.data_id for dataset in datasets}) == len(datasets)


@pytest.mark.parametrize("options", [KINDS[0], KINDS[8]], ids=["native", "megatron"])
def test_a_dataset_can_be_pickled(folder, options):
    dataset = opened(folder, **options)
    twin = pickle.loads(pickle.dumps(dataset))
    assert (twin.data_id, twin.options) == (dataset.data_id, dataset.options)
    assert np.array_equal(twin.read(range(40)).text, dataset.read(range(40)).text)


def test_a_native_training_set_has_the_length_that_was_asked_for(folder):
    assert len(opened(folder, num_samples=55)) == 55
    short, endless = opened(folder, num_samples=55), opened(folder)
    assert (short.num_samples, endless.num_samples, short.data_id) == (55, None, endless.data_id)
    assert np.array_equal(short[54]["tokens"], endless[54]["tokens"])
    for past in (lambda: short[55], lambda: short.read([3, 55]), lambda: short.locate([55]), lambda: short[-56]):
        with pytest.raises(IndexError, match=r"samples? .* of 55"):
            past()
    assert np.array_equal(short[-1]["tokens"], endless[54]["tokens"])
    with pytest.raises(IndexError, match="no end to count from"):
        endless[-1]
    assert len(list(itertools.islice(short, 60))) == 55
    assert len(list(itertools.islice(endless, 9))) == 9


@pytest.mark.parametrize(
    "ended",
    [{"num_samples": 30}, {"split": "valid", "split_shares": "70,30"}, {"order": "megatron", "name": "a"}],
    ids=str,
)
def test_a_slice_is_that_of_a_list(folder, ended):
    dataset = opened(folder, **ended)
    every = [sample["tokens"].tolist() for sample in dataset]
    assert len(every) == len(dataset)
    for places in (
        slice(2, 7),
        slice(None, 3),
        slice(5, None, 9),
        slice(8, 2, -3),
        slice(4, 10**9),
        slice(6, 2),
        slice(None, None, -1),
        slice(-3, None),
        slice(-5, -1, 2),
        slice(None, -(10**9)),
    ):
        assert [sample["tokens"].tolist() for sample in dataset[places]] == every[places]
    assert dataset[-2]["tokens"].tolist() == every[-2]


def test_a_slice_of_what_has_no_end_says_where_it_ends(folder):
    endless = opened(folder)
    assert [sample["tokens"].tolist() for sample in endless[100:103]] == [
        endless[k]["tokens"].tolist() for k in (100, 101, 102)
    ]
    for wrong in (slice(3, None), slice(None), slice(9, 3, -1)):
        with pytest.raises(TypeError, match="give a stop, or set num_samples"):
            endless[wrong]
    for wrong in (slice(-3, None), slice(3, -1)):
        with pytest.raises(IndexError, match="no end to count from"):
            endless[wrong]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "kind 'gpt', order 'native', split 'train', sequence_length 16, no end, of a, b, data id "),
        ({"num_samples": 5000}, "sequence_length 16, 5,000 samples, of a, b, data id "),
        (
            {"name": "a", "kind": "document", "split": "whole"},
            "<mdata.Dataset kind 'document', order 'native', split 'whole', ",
        ),
    ],
)
def test_a_dataset_is_shown_in_a_line(folder, options, shown):
    dataset = opened(folder, **options)
    assert shown in repr(dataset) and dataset.data_id.startswith(repr(dataset)[:-1].split("data id ")[1])
    assert "\n" not in repr(dataset)


def test_megatron_deals_its_samples_in_their_order(folder):
    dataset = opened(folder, "a", order="megatron", num_samples=60)
    steps = itertools.islice(mdata.Loader(dataset, BatchPlan(8, 2, dp_rank=1, dp_size=2)), 2)
    assert [[batch.samples.tolist() for batch in step] for step in steps] == [[[2, 3], [6, 7]], [[10, 11], [14, 15]]]


@pytest.mark.parametrize("mode", ["mmap", "pread"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_cut_while_it_is_open_is_named(tmp_path, mode, threads):
    write_pair(tmp_path / "c", [[40000]])
    dataset = mdata.open_dataset(tmp_path / "c", sequence_length=16, mode=mode, threads=threads)
    dataset.read(range(2000))
    os.truncate(tmp_path / "c.bin", 10)
    told = r"c\.bin: it is shorter than when it was opened\n  found: its end at byte 10\n"
    for _ in range(2):
        with pytest.raises(DamageError, match=told):
            dataset.read(range(2000))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"order": "random"}, ["no order 'random'", "native, megatron"]),
        ({"mode": "read"}, ["no mode 'read'", "mmap, pread"]),
        ({"kind": "packed", "longer": "wrap"}, ["no rule for longer documents 'wrap'", "cut, drop"]),
        ({"keep_partial": True}, ["the native order has no keep_partial"]),
        ({"pad": 3}, ["the native order has no pad"]),
        ({"order": "megatron", "kind": "document"}, ["the megatron order has no samples of kind 'document'"]),
        ({"eod_mask_loss": True, "eod": None}, ["eod_mask_loss needs the id that ends a document", "set eod"]),
        ({"threads": 0}, ["threads is 0", "1 or more"]),
        ({"sequence_length": 2**31 - 1}, ["sequence_length is 2147483647", "1 to 2147483646"]),
        ({"sequence_length": 2**63, "order": "megatron"}, ["sequence_length is 9223372036854775808"]),
        ({"sequence_length": 2**63 - 1, "split": "whole"}, ["sequence_length is 9223372036854775807"]),
        (
            {"kind": "t5", "decoder_length": 2**63, "eod": None},
            ["decoder_length is 92233720368547", "1 to 2147483646"],
        ),
        ({"num_samples": -3}, ["num_samples is -3", "0 or more"]),
        ({"sequence_length": 0}, ["sequence_length is 0"]),
        ({"sequence_length": "64"}, ["sequence_length is '64'", "an integer"]),
        ({"seed": "x"}, ["seed is 'x'", "an integer"]),
        ({"order": "megatron", "name": "a", "seed": -1}, ["seed -1"]),
        ({"order": "megatron", "name": "a", "split_shares": "0,1"}, ["the split 'train' is empty"]),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(folder, options, words):
    with pytest.raises(UsageError) as caught:
        opened(folder, **options)
    for word in words:
        assert word in str(caught.value)


LOCKED = np.zeros((2, 17), np.int64)
LOCKED.flags.writeable = False


@pytest.mark.parametrize("name", ["a", "mix.json"])
@pytest.mark.parametrize(
    ("out", "found"),
    [
        (np.zeros((2, 17), np.int32), r"int32\[2, 17\]"),
        (np.zeros((2, 17), ">i8"), r">i8\[2, 17\]"),
        (np.zeros((2, 17))[:, ::-1], r"float64\[2, 17\]"),
        (np.zeros((17, 2), np.int64).T, r"int64\[2, 17\]"),
        (np.zeros(34, np.int64), r"int64\[34\]"),
        (LOCKED, r"int64\[2, 17\]"),
        (Rows(np.zeros((2, 17), np.uint64)), r"uint64\[2, 17\]"),
        ([[0] * 17] * 2, "list"),
    ],
)
def test_an_array_that_rows_cannot_be_written_to_is_refused_by_its_type(folder, name, out, found):
    expected = rf"out cannot take 2 samples\n  found: {found}\n  expected: int64\[2, 17\], contiguous and writable\n"
    with pytest.raises(UsageError, match=expected + r"  try: out = dataset\.empty_rows\(2\)"):
        opened(folder, name).read([0, 1], out=out)


ENDLESS = [{}, {"shuffle_block": 4}, {"kind": "document"}, {"kind": "packed"}, {"document_masks": True}]


@pytest.mark.parametrize("name", ["a", "mix.json"])
@pytest.mark.parametrize("options", ENDLESS, ids=str)
def test_samples_go_on_to_two_to_the_62_whoever_asks(folder, name, options):
    dataset = opened(folder, name, **options)
    last = 2**62 - 1
    assert np.array_equal(dataset.read([last]).tokens[0], dataset[last]["tokens"])
    said = r"from 0 to below 2\^62"
    for beyond in (2**62, 2**63 - 1, 2**63, 2**64, 2**70):
        with pytest.raises(IndexError, match=said):
            dataset[beyond]
        with pytest.raises(IndexError, match=said):
            dataset.read([beyond])
    with pytest.raises(IndexError, match=said):
        dataset.read([last, last + 1])
    with pytest.raises(TypeError, match="not float64"):
        dataset.read([0.5])


def test_rows_of_another_shape_and_samples_that_are_not_there_are_refused(folder):
    dataset = opened(folder)
    with pytest.raises(ValueError, match=r"out cannot take 2 samples\n  found: int64\[3, 17\]"):
        dataset.read([1, 2], out=np.zeros((3, 17), np.int64))
    for wrong in ([-1], [0, -1]):
        with pytest.raises(IndexError, match="-1"):
            dataset.read(wrong)
        with pytest.raises(IndexError, match="-1"):
            opened(folder, "a").read(wrong)
    assert DatasetOptions(sequence_length=4) == DatasetOptions(sequence_length=4)
    assert dataset.read([]).text.shape == (0, 17)
    for call in (
        lambda: dataset[3.0],
        lambda: dataset["3"],
        lambda: dataset.read([1.5]),
        lambda: dataset.locate([True]),
    ):
        with pytest.raises(TypeError, match="sample numbers are integers"):
            call()
