"""`mdata build`: runs find the arrays that it makes; the first run reports them as built, the next as found."""

from __future__ import annotations

import json

import numpy as np
import pytest

import mdata
from cli.mdata import main
from mdata.samples import megatron_gpt, packed
from tests.helpers.corpora import write_pair
from tests.helpers.open_by_keys import open_by_keys


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.delenv("MDATA_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    write_pair(tmp_path / "a", [[5], [3, 9], [20]] * 20)
    write_pair(tmp_path / "b", [[8], [4]] * 25, tokens=np.arange(300) + 2000)
    return tmp_path


def built(capsys, *words: str) -> dict:
    assert main(["build", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_packed_rows_are_built_once_and_found_by_a_run(folder, capsys, monkeypatch):
    words = ["a", "-S", "8", "--kind", "packed", "--split-shares", "80,20"]
    assert main(["build", *words]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].split() == ["split", "what", "of", "entries", "bytes", "seconds", "where"]
    assert [line.split()[:3] for line in told[1:3]] == [["train", "packed", "a"], ["valid", "packed", "a"]]
    assert [line.split()[6] for line in told[1:3]] == ["built", "built"]
    assert told[3].startswith("samples: train without end, valid ") and "MiB of memory at peak" in told[3]
    again = built(capsys, *words)
    assert [part["built"] for part in again["arrays"]] == [False, False]
    assert again["peak_bytes"] > 1 << 20
    monkeypatch.setattr(packed, "packed", None)
    for split in ("train", "valid"):
        dataset = mdata.open_dataset("a", sequence_length=8, split=split, split_shares="80,20", kind=mdata.Packed())
        assert dataset.num_samples == again["samples"][split]


def test_megatrons_names_make_megatrons_arrays(folder, capsys, monkeypatch):
    flags = ["--seq-length", "8", "--split", "70,20,10", "--seed", "3", "--order", "megatron"]
    counts = ["--train-samples", "90", "--valid-samples", "10", "--data-cache-path", "kept"]
    made = built(capsys, "--data-path", "0.7", "a", "0.3", "b", *flags, *counts, "--test-samples", "5")
    assert made["samples"] == {"train": 90, "valid": 10, "test": 6}  # each share of 5 is rounded up
    kinds = [(part["split"], part["what"], part["component"]) for part in made["arrays"]]
    each = [("megatron-gpt", "a"), ("megatron-gpt", "b"), ("megatron-blend", None)]
    assert kinds == [(split, *one) for split in ("train", "valid", "test") for one in each]
    assert all(part["path"].startswith("kept/") for part in made["arrays"])
    monkeypatch.setattr(megatron_gpt, "build", None)
    options = {"sequence_length": 8, "seed": 3, "order": "megatron", "split_shares": "70,20,10", "cache": "kept"}
    assert len(open_by_keys("0.7 a 0.3 b", num_samples=90, **options)) == 90
    assert len(open_by_keys("0.7 a 0.3 b", num_samples=5, split="test", **options)) == 6


def test_a_blends_surplus_is_given_as_the_run_gives_it(folder, capsys, monkeypatch):
    flags = ["0.7", "a", "0.3", "b", "-S", "8", "--order", "megatron", "--train-samples", "200", "--cache", "kept"]
    usual = built(capsys, *flags)["arrays"]
    larger = built(capsys, *flags, "--blend-surplus", "1.5")["arrays"]
    assert [(part["what"], part["built"]) for part in larger] == [
        ("megatron-gpt", True),
        ("megatron-gpt", True),
        ("megatron-blend", False),
    ]
    assert all(more["rows"] > few["rows"] for few, more in zip(usual[:2], larger[:2], strict=True))
    assert not any(part["built"] for part in built(capsys, *flags, "--mid-level-dataset-surplus", "1.5")["arrays"])
    monkeypatch.setattr(megatron_gpt, "build", None)
    data = mdata.open_dataset(
        "0.7 a 0.3 b", sequence_length=8, num_samples=200, cache="kept", order=mdata.MegatronOrder(blend_surplus=1.5)
    )
    assert data.components[0].samples.request.num_samples == 350


def test_what_is_computed_needs_nothing(folder, capsys):
    assert main(["build", "a", "--sequence-length", "8"]) == 0
    assert capsys.readouterr().out.startswith(
        "nothing to build: this order needs no arrays\nsamples: train without end;"
    )
    assert not (folder / "cache").exists()


def test_the_whole_is_one_set(folder, capsys):
    made = built(capsys, "b", "-S", "8", "--kind", "packed", "--whole")
    assert [part["split"] for part in made["arrays"]] == ["whole"]
    dataset = mdata.open_dataset("b", sequence_length=8, split="whole", kind="packed")
    assert dataset.num_samples == made["samples"]["whole"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-S", "8"], "no data is given"),
        (["a", "-S", "8", "--train-samples", "5"], "the native order has no --train-samples"),
        (["a", "-S", "8", "--blend-surplus", "0.1"], "the native order has no blend_surplus"),
        (["a", "-S", "8", "--kind", "packed", "--order", "megatron"], "the megatron order has no samples of kind"),
        (["a", "-S", "8", "--kind", "t5"], "need the decoder's length"),
        (["a", "-S", "8", "--kind", "bert"], "does not say which tokens begin"),
    ],
)
def test_what_makes_no_sense_is_refused(folder, capsys, words, said):
    assert main(["build", *words]) == 2
    assert said in capsys.readouterr().err
