"""[data] of a run: each order and kind trains; in Megatron's order with the numbers that Megatron requests."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import mdata
from cli.mdata import main as cli_main
from mdata.loader.loader import collate
from mdata.manifest.io import load_manifest, save_manifest
from tests.helpers.corpora import write_pair
from tests.helpers.open_by_keys import open_by_keys
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_mix
from trainer.config.sections import (
    CheckpointSection,
    DataSection,
    ModelSection,
    OptimizerSection,
    RunConfig,
    RunSection,
    TrainSection,
)
from trainer.parallel.mesh import Mesh
from trainer.plan.check import check
from trainer.plan.plan import make_plan
from trainer.run.data import open_data, to_device, training_batches
from trainer.run.metrics import read_metrics
from trainer.run.train import train


@pytest.fixture(scope="module")
def blend(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    make_mix(folder, ["first", "second"])
    return folder / "mix.json"


def config_of(blend, folder, *, steps=3, **data) -> RunConfig:
    return RunConfig(
        run=RunSection(folder=str(folder), seed=7),
        model=ModelSection(num_layers=1, hidden_size=16, num_heads=2),
        data=DataSection(blend=str(blend), split="90,10", **data),
        train=TrainSection(
            sequence_length=32, global_batch=4, micro_batch=2, steps=steps, eval_interval=2, eval_samples=6
        ),
        optimizer=OptimizerSection(lr=1e-2),
    )


def _train(context, config):
    return train(config, context.join(Mesh(context.world, config.mesh.tp))).valid


CHOICES = {
    "megatron": {"order": "megatron"},
    "packed": {"kind": "packed"},
    "document": {"kind": "document"},
    "blocks": {"shuffle_block": 16},
}


@pytest.mark.parametrize("name", CHOICES)
def test_each_order_and_kind_trains(blend, tmp_path, name):
    config = config_of(blend, tmp_path / "run", cache=str(tmp_path / "cache"), **CHOICES[name])
    run_ranks(_train, 1, config)
    lines = list(read_metrics(tmp_path / "run"))
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(np.isfinite(line["loss"]) for line in lines)
    assert set(lines[1]["valid"]) == {"valid"}
    assert any((tmp_path / "cache").glob("*-*")) == (name in ("megatron", "packed"))


@pytest.mark.parametrize("split", ["100", "100,0,0", "100, 0,0", "100,0.0,0", "100,00", "90,10"])
def test_the_facts_tell_whether_there_are_validation_sets(blend, tmp_path, split):
    """By a share of the split, by data.valid, or by the blend itself."""
    config = config_of(blend, tmp_path)
    config = replace(config, checkpoint=CheckpointSection(keep_best=1), data=replace(config.data, split=split))
    found = check(config, 1, facts=open_data(config).facts)
    assert len(found) == (split != "90,10") and all("the data has no validation set" in problem for problem in found)
    first, second = (str(blend.parent / f"{name}_text_document.json") for name in ("first", "second"))
    given = replace(config, data=replace(config.data, blend=first, valid=(second,)))
    assert check(given, 1, facts=open_data(given).facts) == []
    (tmp_path / "mix.toml").write_text(f'[valid]\nheld = "{second}"\n[[component]]\npath = "{first}"\nweight = "1"\n')
    assert cli_main(["blend", str(tmp_path / "mix.toml"), "--output", str(tmp_path / "mix.json")]) == 0
    named = replace(config, data=replace(config.data, blend=str(tmp_path / "mix.json")))
    assert check(named, 1, facts=open_data(named).facts) == []


def test_each_choice_is_other_data(blend, tmp_path):
    made = [open_data(config_of(blend, tmp_path, **choice)).train for choice in [{}, *CHOICES.values()]]
    assert len({dataset.data_id for dataset in made}) == len(made)


def test_megatrons_order_asks_for_what_the_run_reads(blend, tmp_path):
    data = open_data(config_of(blend, tmp_path, order="megatron"))
    options = {"sequence_length": 32, "seed": 7, "order": "megatron", "split_shares": "90,10"}
    train, valid = (
        open_by_keys(blend, num_samples=count, split=split, **options)
        for split, count in (("train", 12), ("valid", 12))
    )
    assert (data.train.data_id, data.valid["valid"].data_id) == (train.data_id, valid.data_id)
    longer = open_data(config_of(blend, tmp_path, order="megatron", steps=4)).train.identity
    assert {name for name, value in longer.items() if value != data.train.identity[name]} == {"num_samples"}


def test_megatrons_rows_are_dealt_in_their_order(blend, tmp_path):
    config = config_of(blend, tmp_path, order="megatron")
    data = open_data(config)
    plan = make_plan(config, 1, facts=data.facts)
    dp = type("Group", (), {"rank": 0, "size": 1})
    with_steps = zip(range(3), training_batches(data, config, plan=plan, dp=dp, consumed=0), strict=False)
    read = [batch.samples.tolist() for _, step in with_steps for batch in step]
    assert read == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_megatrons_blends_take_the_surplus_of_the_run(blend, tmp_path):
    less, more = (
        open_data(config_of(blend, tmp_path, order="megatron", blend_surplus=part)).train for part in (0.005, 0.5)
    )
    assert (less.identity["blend_surplus"], more.identity["blend_surplus"]) == ("0.005", "0.5")
    assert check(config_of(blend, tmp_path, blend_surplus=0.5), 1, facts=None)[0].startswith("data.blend_surplus=0.5")


def test_what_does_not_go_together_is_told(blend, tmp_path):
    config = config_of(blend, tmp_path, order="megatron", kind="packed", shuffle_block=8)
    problems = check(config, 1, facts=None)
    assert len(problems) == 2
    assert problems[0].startswith('data.kind="packed" needs data.order="native"')
    assert problems[1].startswith("data.shuffle_block=8 applies only to")
    short = open_data(replace(config_of(blend, tmp_path, kind="packed"))).facts
    assert check(config_of(blend, tmp_path, kind="packed"), 1, facts=short) == []


@pytest.mark.parametrize("options", [{}, {"extra_token": False}, {"kind": "packed"}, {"split": "whole"}], ids=str)
def test_a_device_gets_the_loss_mask_whether_or_not_it_has_to_be_sent(blend, options):
    dataset = open_by_keys(blend, sequence_length=32, **options)
    last = (dataset.num_samples or 8) - 4
    batches = [collate(dataset, np.arange(first, first + 4)) for first in (0, last)]
    for batch in batches:
        moved = to_device(batch, torch.device("cpu"), vocab_size=dataset.vocab_size)
        assert np.array_equal(moved.loss_mask_BS.numpy(), batch.loss_mask)
        assert moved.loss_mask_BS.dtype == torch.float32
        assert np.array_equal(moved.tokens_BS.numpy(), batch.tokens)
    sent = [not batch.rows.unmasked for batch in batches]
    assert sent == [bool(options) and "split" not in options, bool(options)]


def test_a_corpus_of_no_known_tokenizer_needs_the_word_of_the_run(blend, tmp_path):
    """Beside the training data, and as a validation set; the ids of each batch are checked all the same."""
    write_pair(tmp_path / "foreign", [[200]] * 3)
    known = mdata.load_manifest(blend).components[0].path
    words = f"0.5 {blend.parent / known} 0.5 {tmp_path / 'foreign'}"
    for data, valid in ((words, ()), (blend, (str(tmp_path / "foreign"),))):
        refused, allowed = (
            replace(config, data=replace(config.data, valid=valid, tokenizer_unknown=word))
            for word in ("refuse", "ok")
            for config in [config_of(data, tmp_path / "run")]
        )
        with pytest.raises(mdata.UsageError, match=r'data\.tokenizer_unknown = "ok"'):
            open_data(refused)
        opened = open_data(allowed)
        assert opened.facts.vocab_size is not None
    rows = collate(opened.valid["foreign"], np.arange(2))
    with pytest.raises(mdata.UsageError, match="outside the model's vocabulary"):
        to_device(rows, torch.device("cpu"), vocab_size=10)


def test_a_manifest_that_names_files_elsewhere_needs_the_word_of_the_run(blend, tmp_path):
    source = blend.parent / load_manifest(blend).components[0].path
    known = load_manifest(source)
    (shard,) = known.shards
    moved = msgspec.structs.replace(shard, path=os.path.relpath(source.parent / shard.path, tmp_path))
    save_manifest(msgspec.structs.replace(known, shards=[moved]), tmp_path / "moved.json")
    with pytest.raises(mdata.UsageError, match=r"outside its folder[\s\S]*data.allow_outside"):
        open_data(config_of(tmp_path / "moved.json", tmp_path))
    opened = open_data(config_of(tmp_path / "moved.json", tmp_path, allow_outside=True))
    assert opened.train.options.allow_outside and opened.valid
