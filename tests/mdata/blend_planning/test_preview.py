"""The preview of a blend is exact: the numbers of the table are those of an open dataset."""

from __future__ import annotations

import numpy as np
import pytest

import mdata
from mdata import UsageError
from mdata.blend.compose import plan_blend
from mdata.blend_planning.make_blend import save_blend
from mdata.blend_planning.preview import blend_table
from mdata.blend_planning.redistribute import redistribute_blend
from tests.helpers.corpora import write_pair


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    """a: 1,000 tokens in 100 sequences, b: 500, c: 250, each in sequences of 10."""
    for name, count in (("a", 100), ("b", 50), ("c", 25)):
        write_pair(tmp_path / f"{name}_text_document", [[10]] * count)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def made(*entries, **tables):
    return mdata.make_blend({"component": list(entries), **tables}, "mix.json")


THREE = ({"path": "a_text_document", "weight": 2}, {"path": "b_text_document", "weight": 1},
         {"path": "c_text_document", "weight": 1})  # fmt: skip
PHASES = [{"samples": 40}, {"tokens": 160, "shares": {"c": 1}}, {"shares": {"a": 1, "b": 3}}]


@pytest.mark.parametrize("split", ["100,0,0", "80,20,0"])
def test_the_table_is_what_a_dataset_reads(corpora, split):
    blend = made(*THREE, phase=PHASES)
    preview = mdata.preview_blend(blend, sequence_length=8, samples=150, split=split)
    data = mdata.open_dataset("mix.json", sequence_length=8, split="train", split_shares=split)
    components, inside = data.locate(np.arange(150))
    for number, row in enumerate(preview.rows):
        mine = np.flatnonzero(components == number)
        assert row.samples == len(mine)
        assert row.read_tokens == 8 * len(mine)
        assert row.achieved == len(mine) / 150
        assert row.samples_per_epoch == data.components[number].samples.samples_per_epoch
        assert row.epochs == len(mine) / row.samples_per_epoch
        assert row.phases == tuple(np.mean(part == number) for part in np.split(components, [40, 60]))
        once = np.flatnonzero((components == number) & (inside == row.samples_per_epoch - 1))
        assert row.once_at == (once[0] + 1 if len(once) else None)
    assert preview.starts == (0, 40, 60)
    assert [row.share for row in preview.rows] == ["2 > 0 > 1", "1 > 0 > 3", "1 > 1 > 0"]


def test_without_a_sequence_length_a_sample_is_a_token(corpora):
    preview = mdata.preview_blend(made(*THREE), tokens=2_000)
    assert [(row.read_tokens, row.epochs, row.samples) for row in preview.rows] == [
        (1000, 1.0, None),
        (500, 1.0, None),
        (500, 2.0, None),
    ]
    assert preview.rows[2].once_at == 1000
    assert [row.epochs for row in mdata.preview_blend(made(*THREE)).rows] == [None] * 3
    with pytest.raises(UsageError, match=r"counts in samples\n.*--sequence-length"):
        mdata.preview_blend(made(*THREE, phase=PHASES))
    assert [row.achieved for row in blend_table(made(*THREE, phase=PHASES))] == [0.25, 0.75, 0]


def test_a_blend_that_ends_is_told_to_its_end(corpora):
    blend = made(*({"path": f"{name}_text_document", "epochs": n} for name, n in (("a", 1), ("b", 2), ("c", "1/2"))))
    preview = mdata.preview_blend(blend, sequence_length=8)
    assert [row.epochs for row in preview.rows] == pytest.approx([1, 2, 0.5], abs=0.02)
    assert preview.num_samples == sum(row.samples for row in preview.rows)
    data = mdata.open_dataset("mix.json", sequence_length=8)
    assert data.num_samples == len(data) == preview.num_samples
    for read in (data.locate, data.read, lambda k: data[k[0]]):
        with pytest.raises(IndexError, match=str(preview.num_samples)):
            read([preview.num_samples])


@pytest.mark.parametrize("length", [{"samples": -1}, {"tokens": -9}])
def test_a_training_of_less_than_nothing_is_refused(corpora, length):
    with pytest.raises(UsageError, match="a training of -1 samples"):
        mdata.preview_blend(made(*THREE), sequence_length=8, **length)


def test_one_corpus_read_once_ends_too(corpora):
    made({"path": "c_text_document"}, exhaustive=True)
    data = mdata.open_dataset("mix.json", sequence_length=8)
    assert data.num_samples == data.components[0].samples.samples_per_epoch
    data.read([data.num_samples - 1])
    with pytest.raises(IndexError, match=str(data.num_samples)):
        data.read([data.num_samples])


def test_caps_end_the_blend_and_say_whose(corpora):
    capped = [{**entry, **({"max_epochs": 2} if entry["weight"] == 2 else {})} for entry in THREE]
    blend = made(*capped)
    preview = mdata.preview_blend(blend, sequence_length=8)
    assert preview.rows[0].epochs == 2 and preview.blend.num_samples == preview.num_samples
    data = mdata.open_dataset("mix.json", sequence_length=8)
    assert data.num_samples == preview.num_samples
    with pytest.raises(UsageError, match=r"found: [0-9]+ samples .*; a is at 2 of 2 epochs\n.*expected: 1,000 samples"):
        mdata.preview_blend(blend, sequence_length=8, samples=1000)


def test_corpora_that_are_too_short_are_all_said(corpora):
    with pytest.raises(UsageError, match=r"2 problems:\n.*corpus b is shorter.*found: 500 tokens.*\n.*corpus c"):
        mdata.preview_blend(made(*THREE), sequence_length=600)


def test_a_slip_in_the_split_is_one_slip(corpora):
    with pytest.raises(UsageError, match=r'^the split string cannot be used\n  found: .x.\n.*\n  try: "969,30,1"'):
        mdata.preview_blend(made(*THREE), sequence_length=8, split="x")


def test_redistribution_is_recorded_in_samples(corpora):
    entries = [{**entry, "max_epochs": 1} if "b" in entry["path"] else entry for entry in THREE]
    blend = made(*entries, phase=[{"samples": 100}, {"shares": {"b": 3, "c": 1}}])
    with pytest.raises(UsageError, match="the blend ends before"):
        mdata.preview_blend(blend, sequence_length=8, samples=200)
    spread = redistribute_blend(blend, sequence_length=8, samples=200)
    preview = mdata.preview_blend(spread, sequence_length=8, samples=200)
    b = preview.rows[1]
    assert (b.samples, b.epochs) == (b.samples_per_epoch, 1.0)
    assert [row.samples for row in preview.rows] == [50, b.samples, 150 - b.samples]
    assert spread.manifest.phases[0].shares == ["50", "25", "25"]
    assert spread.manifest.phases[1].shares == ["0", str(b.samples - 25), str(125 - b.samples)]
    assert spread.manifest.notes["redistributed"]["sequence_length"] == 8
    save_blend(spread, corpora / "spread.json")
    assert mdata.open_dataset("spread.json", sequence_length=8).num_samples == 200


def test_a_spec_that_asks_for_redistribution(corpora):
    entries = [{**entry, "max_epochs": 1} if "b" in entry["path"] else entry for entry in THREE]
    spec = {"component": entries, "redistribute": True}
    made_ = mdata.make_blend(spec, "mix.json", sequence_length=8, samples=400)
    plain = plan_blend({"component": entries}, corpora)
    assert made_.manifest.id == redistribute_blend(plain, sequence_length=8, samples=400).manifest.id
    with pytest.raises(UsageError, match="found: no --sequence-length"):
        mdata.make_blend(spec, "mix.json")
    with pytest.raises(UsageError, match="resolved when a manifest is written"):
        plan_blend(spec, corpora)


def test_redistribution_that_cannot_be(corpora):
    entries = [{**entry, "max_epochs": 1} for entry in THREE]
    with pytest.raises(UsageError, match=r"all caps together leave [0-9]+ samples, its length is 999"):
        redistribute_blend(made(*entries), sequence_length=8, samples=999)
    with pytest.raises(UsageError, match="needs the length"):
        redistribute_blend(made(*entries), sequence_length=8)
    with pytest.raises(UsageError, match="no --sequence-length"):
        redistribute_blend(made(*entries), sequence_length=None)
    ramp = made(*entries, phase=[{"samples": 5}, {"samples": 5, "ramp": True}])
    with pytest.raises(UsageError, match="found: ramps"):
        redistribute_blend(ramp, sequence_length=8)


@pytest.mark.parametrize("change", [{"phase": PHASES}, {"samples": 9}, {"exhaustive": True}])
def test_megatrons_order_knows_weights_alone(corpora, change):
    entries = [{"path": entry["path"]} for entry in THREE] if "exhaustive" in change else THREE
    made(*entries, **change)
    with pytest.raises(UsageError, match="Megatron's order supports only weights"):
        mdata.open_dataset("mix.json", sequence_length=8, num_samples=5, order=mdata.MegatronOrder())
