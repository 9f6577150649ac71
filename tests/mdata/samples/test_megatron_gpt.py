"""GPT samples in Megatron's order: its own 30 sets bit for bit, and a slow twin where there are no oracles."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import mdata
from mdata import UsageError
from mdata.order.megatron_order import MegatronRequest
from mdata.samples import megatron_gpt
from mdata.samples.megatron_gpt import MegatronGptSamples
from mdata.samples.rows import RowOptions, effective_pad
from tests.conftest import oracle_folder
from tests.helpers.corpora import FileStream, write_pair
from tests.helpers.examples import examples
from tests.helpers.open_by_keys import open_by_keys
from tests.reference.gpt_samples import megatron_samples

FOLDER = oracle_folder() / "oracle/gpt_indices"


def sets() -> list[dict]:
    return json.loads((FOLDER / "cases.json").read_text())["samples"] if FOLDER.is_dir() else []


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("provenance")
    with np.load(FOLDER / "provenance.npz") as stored:
        documents = [[length] for length in stored["lengths"].tolist()]
        write_pair(folder / "prov", documents, tokens=stored["tokens"])
        write_pair(folder / "prov_u16", documents, tokens=stored["tokens"], code=8)
        write_pair(folder / "prov_eod", documents, tokens=stored["tokens_eod"])
    return folder


def options_of(case: dict) -> mdata.DatasetOptions:
    return mdata.DatasetOptions(
        sequence_length=case["sequence_length"],
        seed=case["random_seed"],
        split=case["split"],
        split_shares=case["split_string"],
        num_samples=case["num_samples"],
        kind=mdata.Gpt(
            extra_token=case["add_extra_token_to_sequence"],
            document_masks=case["inter_document_masking"],
            eod_mask_loss=case["eod_mask_loss"],
            reset_position_ids=case["reset_position_ids"],
            reset_attention_mask=case["reset_attention_mask"],
            create_attention_mask=case["create_attention_mask"],
            eod=case["eod"],
        ),
        order=mdata.MegatronOrder(
            keep_partial=not case["drop_last_partial_validation_sequence"],
            pad=case["pad"],
            allow_ambiguous_pad=case["allow_ambiguous_pad_tokens"],
        ),
    )


@pytest.mark.parametrize("case", sets(), ids=lambda case: case["id"])
def test_samples_are_megatrons(oracles, corpora, case):
    dataset = mdata.Dataset.from_options(corpora / case["corpus"], options_of(case))
    kind = dataset.components[0].samples
    assert (len(dataset), dataset.row_options.pad) == (case["length"], case["effective_pad"])
    rows = [dataset[k] for k in case["indices"]]
    if case["last_row_is_index_None"]:
        rows.append({**kind.sample(0), "loss_mask": np.zeros_like(kind.sample(0)["loss_mask"])})
    assert list(rows[0]) == case["keys"]
    with np.load(FOLDER / "samples.npz") as stored:
        for name in case["keys"]:
            expected = stored[f"{case['id']}_{name}"]
            made = np.stack([row[name] for row in rows])
            assert (str(made.dtype), list(made.shape)) == (case[name]["dtype"], case[name]["shape"])
            if name == "attention_mask":
                made = np.packbits(made)
            assert np.array_equal(made, expected.reshape(made.shape)), name
    check_read(dataset, case["indices"], rows)


def check_read(dataset, samples, rows) -> None:
    """`read` gives what single samples are."""
    read = dataset.read(samples)
    assert np.array_equal(read.tokens, [row["tokens"] for row in rows[: len(samples)]])
    assert np.array_equal(read.labels, [row["labels"] for row in rows[: len(samples)]])
    assert np.array_equal(read.loss_mask, [row["loss_mask"] for row in rows[: len(samples)]])
    assert np.array_equal(read.position_ids, [row["position_ids"] for row in rows[: len(samples)]])
    if read.cu_seqlens is not None:
        length = dataset.options.sequence_length
        starts = {
            i * length + start for i, row in enumerate(rows[: len(samples)]) for start in row["cu_seqlens"].tolist()
        }
        assert read.cu_seqlens.tolist() == sorted(starts)
        assert read.max_seqlen == max(row["max_seqlen"] for row in rows[: len(samples)])
    buffer = np.full((len(samples), dataset.options.sequence_length + 1), -9, np.int64)
    assert dataset.read(samples, out=buffer).text is buffer
    assert np.array_equal(buffer[:, :-1], read.tokens)


@examples(150)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.data())
def test_samples_are_those_of_the_twin(tmp_path_factory, lengths, data):
    total = sum(lengths)
    assume(total > 0)
    flags = data.draw(st.tuples(*[st.booleans()] * 5))
    request = MegatronRequest(
        first=0,
        stop=len(lengths),
        sequence_length=data.draw(st.integers(1, 12)),
        num_samples=data.draw(st.none() | st.integers(0, 12)),
        seed=data.draw(st.integers(0, 5)),
        extra_token=flags[0],
        keep_partial=flags[1],
    )
    options = RowOptions(
        sequence_length=request.sequence_length,
        position_ids=True,
        document_masks=flags[2],
        mask_eod=flags[3],
        reset_position_ids=flags[4] and not flags[2],
        eod=data.draw(st.integers(0, 3)),
        pad=data.draw(st.integers(-1, 3)),
    )
    tokens = data.draw(st.lists(st.integers(0, 3), min_size=total, max_size=total))
    prefix = tmp_path_factory.mktemp("m") / "x"
    write_pair(prefix, [[length] for length in lengths], tokens=np.array(tokens))
    made = MegatronGptSamples(FileStream(prefix), request, options=options)
    found = [{name: value.tolist() for name, value in made.sample(k).items()} for k in range(made.num_samples)]
    assert found == megatron_samples(lengths, tokens, request=request, options=options)


def test_a_sample_does_not_depend_on_what_was_read_before(tmp_path):
    write_pair(tmp_path / "x", [[7]] * 3, tokens=np.arange(21) % 5)
    request = MegatronRequest(first=0, stop=3, sequence_length=4, num_samples=None, seed=1)
    made = MegatronGptSamples(FileStream(tmp_path / "x"), request, options=RowOptions(sequence_length=4, pad=3))
    first = made.sample(0)["loss_mask"].tolist()
    assert 0.0 in first
    for k in range(made.num_samples):
        made.sample(k)["loss_mask"][:] = 5
    assert made.sample(0)["loss_mask"].tolist() == first


def test_samples_outside_are_refused(tmp_path):
    write_pair(tmp_path / "x", [[7]] * 3)
    request = MegatronRequest(first=0, stop=3, sequence_length=4, num_samples=None, seed=1)
    made = MegatronGptSamples(FileStream(tmp_path / "x"), request, options=RowOptions(sequence_length=4, pad=-1))
    for k in (-1, made.num_samples):
        with pytest.raises(IndexError, match=f"samples {k} to {k} of"):
            made.sample(k)


def test_the_pad_that_counts():
    assert effective_pad(None, 3) == -1
    assert effective_pad(4, 3) == 4
    assert effective_pad(3, 3) == -1
    assert effective_pad(3, 3, allow_ambiguous=True) == 3


def test_sequences_in_any_order_on_disk_and_over_shards_are_served(tmp_path):
    """What the native order cannot read: sequences that do not follow each other."""
    write_pair(tmp_path / "a", [[2], [3]])
    index = bytearray((tmp_path / "a.idx").read_bytes())
    index[42:58] = np.array([12, 0], "<i8").tobytes()  # three tokens at 0 belong to the second
    (tmp_path / "a.idx").write_bytes(index)
    dataset = mdata.open_dataset(tmp_path / "a", sequence_length=4, order=mdata.MegatronOrder())
    assert sorted(dataset[0]["tokens"].tolist() + dataset[0]["labels"].tolist()[-1:]) == [0, 1, 2, 3, 4]
    with pytest.raises(UsageError, match=r"are not contiguous in \.bin"):
        mdata.open_dataset(tmp_path / "a", sequence_length=4)


def test_arrays_are_kept_and_found_again(tmp_path, monkeypatch):
    write_pair(tmp_path / "x", [[5, 4], [3], [20]] * 10)
    options = {"sequence_length": 8, "order": "megatron", "num_samples": 70}
    built = open_by_keys(tmp_path / "x", **options)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    kept = [open_by_keys(tmp_path / "x", **options, cache=str(tmp_path / "cache"))]
    assert len(list(tmp_path.glob("cache/megatron-gpt-*"))) == 1
    monkeypatch.setattr(megatron_gpt, "build", None)
    kept += [
        open_by_keys(tmp_path / "x", **options, cache=str(tmp_path / "cache")),
        pickle.loads(pickle.dumps(kept[0])),
    ]
    kept.append(open_by_keys(tmp_path / "x", **options, cache=str(tmp_path / "cache"), mode="pread"))
    for dataset in kept:
        assert dataset.data_id == built.data_id
        assert np.array_equal(dataset.read(range(len(built))).text, built.read(range(len(built))).text)
    monkeypatch.undo()
    for change in ({"num_samples": 71}, {"seed": 1}, {"extra_token": False}, {"split": "whole"}):
        open_by_keys(tmp_path / "x", **{**options, **change}, cache=str(tmp_path / "cache"))
    # The whole is the part that training has: no array depends on more than it must.
    assert len(list(tmp_path.glob("cache/megatron-gpt-*"))) == 4
    half = {**options, "split": "valid", "split_shares": "1,1", "num_samples": None, "cache": str(tmp_path / "cache")}
    whole_rows, all_rows = (len(open_by_keys(tmp_path / "x", **half, keep_partial=keep)) for keep in (False, True))
    assert all_rows == whole_rows + 1
    assert len(list(tmp_path.glob("cache/megatron-gpt-*"))) == 6
