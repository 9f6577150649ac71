"""The evaluation sets of training: those given, those of the blend, or the blend's part of the split."""

from __future__ import annotations

import numpy as np
import pytest

import mdata
from mdata import DamageError, UsageError
from mdata.dataset.eval_sets import evaluation_sets
from tests.helpers.corpora import write_pair
from tests.helpers.open_by_keys import open_by_keys


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """train, and held-out corpora p and q; mix.json names p and q for both purposes."""
    monkeypatch.chdir(tmp_path)
    for name, tokens in (("train", 400), ("p", 90), ("q", 60)):
        write_pair(tmp_path / f"{name}_text_document", [[tokens // 10]] * 10)
    sets = {"valid": {"prose": "p_text_document"}, "test": {"later": "q_text_document", "prose": "p_text_document"}}
    mdata.make_blend({"component": [{"path": "train_text_document"}], **sets}, "mix.json")
    return tmp_path


def train(path="mix.json", **options) -> mdata.Dataset:
    return open_by_keys(path, sequence_length=8, seed=3, **options)


@pytest.mark.parametrize("order", [{}, {"order": "megatron", "num_samples": 20}])
def test_sets_of_the_blend(order):
    found = evaluation_sets(train(**order), "test")
    assert list(found) == ["later", "prose"]
    assert list(evaluation_sets(train(**order), "valid")) == ["prose"]
    later = found["later"]
    assert (later.options.split, later.options.seed, later.options.order.name) == (
        "whole",
        3,
        order.get("order", "native"),
    )
    alone = train("q_text_document", **order | {"split": "whole", "num_samples": None})
    assert later.data_id == alone.data_id
    assert np.array_equal(later.read(np.arange(5)).text, alone.read(np.arange(5)).text)


def test_paths_take_their_place_and_are_called_as_their_files():
    mdata.make_blend(["1", "p_text_document", "1", "q_text_document"], "both.json")
    found = evaluation_sets(train(), "test", paths=["both.json", "q_text_document"])
    assert list(found) == ["both", "q"]
    assert [len(one) for one in found.values()] == [len(train("both.json", split="whole")), 8]
    with pytest.raises(UsageError, match=r"data\.test holds two sets called q\n  found: q_text_document, q_text"):
        evaluation_sets(train(), "test", paths=["q_text_document", "q_text_document.idx"])


@pytest.mark.parametrize(
    ("shares", "valid", "test"), [("100,0,0", [], []), ("80,0,20", [], ["test"]), ("80,10,10", ["valid"], ["test"])]
)
def test_parts_of_the_split(shares, valid, test):
    data = train("train_text_document", split_shares=shares)
    sets = {split: evaluation_sets(data, split) for split in ("valid", "test")}
    assert [list(found) for found in sets.values()] == [valid, test]
    for split, found in sets.items():
        for one in found.values():
            assert one.data_id == train("train_text_document", split_shares=shares, split=split).data_id


def test_in_megatrons_order_as_many_samples_as_are_asked_for():
    data = train(order="megatron", num_samples=20)
    assert len(evaluation_sets(data, "test", num_samples=30)["later"]) >= 30
    assert len(evaluation_sets(data, "test")["later"]) == 7
    assert len(evaluation_sets(train(), "test", num_samples=30)["later"]) == 8


@pytest.mark.parametrize("paths", [[], ["p_text_document"]], ids=["of the blend", "by path"])
def test_in_megatrons_order_the_last_partial_sample_is_kept_of_validation_alone(paths):
    data = train(order="megatron", num_samples=20, keep_partial=True)
    sets = {split: evaluation_sets(data, split, paths=paths) for split in ("valid", "test")}
    (valid,), test = sets["valid"].values(), next(iter(sets["test"].values()))
    assert len(valid) == -(-(90 - 1) // 8) == 12
    assert len(test) == ((90 if paths else 60) - 1) // 8
    if paths:
        assert valid.data_id != test.data_id == train("p_text_document", split="whole", order="megatron").data_id


def test_a_part_of_the_split_keeps_it_in_validation_alone():
    data = train("train_text_document", order="megatron", num_samples=20, keep_partial=True, split_shares="80,10,10")
    assert [len(evaluation_sets(data, split)[split]) for split in ("valid", "test")] == [5, 4]


def test_a_set_that_is_another_is_damage(folder):
    write_pair(folder / "q_text_document", [[6]] * 11)
    with pytest.raises(DamageError, match=r"test set later is not the one that was named(.|\n)*data\.test"):
        evaluation_sets(train(), "test")
    assert list(evaluation_sets(train(), "valid")) == ["prose"]
