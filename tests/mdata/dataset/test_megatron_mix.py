"""Megatron's blends through the dataset: its own numbers and tokens by hash, and what is refused."""

from __future__ import annotations

import hashlib
import json
import pickle

import numpy as np
import pytest

import mdata
from mdata.blend.open_blend import open_blend
from mdata.dataset.dataset import Dataset
from mdata.errors import UsageError
from mdata.mixing.megatron_blend import requests
from tests.helpers.corpora import write_pair
from tests.helpers.open_by_keys import open_by_keys
from tests.reference import megatron_blend as twin

SHARES = {"train": "1,0,0", "valid": "0,1,0", "test": "0,0,1"}


def hash_of(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    """Three corpora of one value a token: a of 400 tokens from 0, b of 200 from 400, c of one token."""
    monkeypatch.chdir(tmp_path)
    write_pair(tmp_path / "a", [[10]] * 40)
    write_pair(tmp_path / "b", [[5]] * 40, tokens=np.arange(400, 600))
    write_pair(tmp_path / "c", [[1]], tokens=np.array([600]))


def opened(words, **options):
    keys = {"sequence_length": 8, "order": "megatron", **options}
    return Dataset(open_blend(words.split()), mdata.DatasetOptions.from_keys(keys))


def test_shares_are_dealt_as_the_twin_deals_them(corpora):
    data = opened("0.3 a 0.7 b", num_samples=50)
    shares, targets, _ = twin.requests([0.3, 0.7], 50, surplus=0.005)
    components, samples = twin.weighted(shares, sum(targets))
    assert data.num_samples == 50
    found = data.locate(np.arange(50))
    assert [part.tolist() for part in found] == [components, samples]
    rows = data.read(np.arange(50))
    for k, (component, inside) in enumerate(zip(components, samples, strict=True)):
        sample = data[k]
        assert next(iter(sample)) == "dataset_id"
        assert sample["dataset_id"].dtype == np.int16
        assert sample["dataset_id"] == component
        expected = data.components[component].samples.sample(inside)["tokens"]
        assert (sample["tokens"] == expected).all()
        assert (rows.tokens[k] == expected).all()
    again = pickle.loads(pickle.dumps(data))
    assert (again.read(np.arange(50)).tokens == rows.tokens).all()
    assert again.data_id == data.data_id


def test_without_shares_every_sample_comes_once_or_by_size(corpora):
    data = opened("a b")
    sizes = [part.samples.num_samples for part in data.components]
    assert sizes == [49, 24]
    components, samples = data.locate(np.arange(73))
    assert (components.tolist(), samples.tolist()) == twin.exhaustive(sizes)
    fewer = opened("a b", num_samples=30)
    assert fewer.num_samples == 30
    assert fewer.locate(np.arange(30))[0].tolist() == twin.weighted([49 / 73, 24 / 73], 30)[0]
    assert opened("a b", num_samples=1000).num_samples == 73
    assert [part.name for part in opened("a b c").components] == ["a", "b"]
    assert len({data.data_id, fewer.data_id, opened("0.3 a 0.7 b", num_samples=30).data_id}) == 3


def test_a_blend_of_one_has_its_surplus_and_its_end(corpora):
    data = opened("1.0 a", num_samples=40)
    assert (data.num_samples, data.components[0].samples.request.num_samples) == (40, 41)
    with pytest.raises(IndexError, match="40"):
        data.read([40])
    assert opened("a", num_samples=40).num_samples == 49


def test_what_cannot_be_mixed_is_refused_by_name(corpora):
    with pytest.raises(UsageError, match=r"needs the number of samples(.|\n)*set num_samples (.|\n)*--train-samples"):
        opened("0.5 a 0.5 b")
    with pytest.raises(UsageError, match="c has a share of the blend and no sample in the split"):
        opened("0.5 a 0.5 c", num_samples=0)
    with pytest.raises(UsageError, match="split 'test' is empty"):
        opened("0.5 a 0.5 b", num_samples=5, split="test")
    with pytest.raises(UsageError, match="not a positive number"):
        opened("0.0 a 1.0 b", num_samples=5)


def test_the_surplus_is_an_option_and_part_of_the_id(corpora):
    data = opened("0.5 a 0.5 b", num_samples=40, blend_surplus=0.5)
    assert [part.samples.request.num_samples for part in data.components] == [30, 30]
    assert data.identity["blend_surplus"] == "0.5"
    assert data.data_id != opened("0.5 a 0.5 b", num_samples=40).data_id
    with pytest.raises(UsageError, match="has no blend_surplus"):
        open_by_keys("0.5 a 0.5 b", sequence_length=8, blend_surplus=0.1)


def test_end_to_end_oracles(oracles, tmp_path, monkeypatch):
    folder = oracles / "oracle" / "blend"
    cases = json.loads((folder / "cases.json").read_text())
    stored = np.load(folder / "arrays.npz")
    monkeypatch.chdir(tmp_path)
    for name, facts in cases["corpora"].items():
        first = facts["first_token_value"]
        lengths = [[int(length)] for length in stored[f"corpus_{name}_lengths"]]
        write_pair(tmp_path / name, lengths, tokens=np.arange(first, first + facts["tokens"]))
    seen = 0
    for case in cases["end_to_end"]:
        for at, split in enumerate(("train", "valid", "test")):
            if "raises" in case or case["splits"][at] is None:
                continue
            check_split(case, case["splits"][at], split=split, size=case["sizes"][at], stored=stored)
            seen += 1
    assert seen > 40


def check_split(case, expected, *, split, size, stored):
    words = case.get("data_path") or case["data_path_per_split"][("train", "valid", "test").index(split)]
    data = Dataset(
        open_blend(words),
        mdata.DatasetOptions(
            sequence_length=case["sequence_length"],
            seed=case["random_seed"],
            split=split,
            split_shares=case["split_string"] or SHARES[split],
            num_samples=size,
            order=mdata.MegatronOrder(blend_surplus=case["mid_level_dataset_surplus"], pad=1000001),
        ),
    )
    name = f"{case['id']}_{split}"
    assert data.num_samples == expected["length"], name
    if expected["class"] == "BlendedDataset":
        assert hash_of(data.selection.components) == expected[f"{split}_dataset_index"]["sha256"], name
        assert hash_of(data.selection.samples) == expected[f"{split}_dataset_sample_index"]["sha256"], name
        built = [(part.samples.request.num_samples, part.samples.num_samples) for part in data.components]
        assert built == [(part["num_samples"], part["length"]) for part in expected["mid_level"]], name
        assert [int(data[k]["dataset_id"]) for k in range(3)] == expected["dataset_id_of_the_first"][:3]
    tokens = f"{name}_tokens"
    if tokens in stored.files:
        rows = data.read(np.arange(len(stored[tokens])))
        assert (rows.tokens == stored[tokens]).all(), name


REFUSED = {
    "b18": "weights and prefixes are mixed",
    "b19": "write each weight before its prefix",
    "b20": "weights and prefixes are mixed",
    "b21": "weights and prefixes are mixed",
    "b22": "share of a is not a positive number",
    "b23": "needs the number of samples",
    "b24": "are the same corpus",
}


def test_refused_oracles(oracles, tmp_path, monkeypatch):
    """Each for its own reason: corpora whose .idx are alike would be refused for that alone."""
    cases = json.loads((oracles / "oracle" / "blend" / "cases.json").read_text())
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate("abd"):
        write_pair(tmp_path / name, [[40]] * (50 + number))
    refused = [case for case in cases["end_to_end"] if "raises" in case]
    assert {case["id"] for case in refused} == set(REFUSED)
    for case in refused:
        if case["id"] == "b24":
            # The same corpus nine times is refused before; for its arithmetic see test_megatron_blend.py.
            assert requests(case["parsed"][1], 60)[2][0] == 31
        with pytest.raises(UsageError, match=REFUSED[case["id"]]):
            opened(" ".join(case["data_path"]), num_samples=case["sizes"][0])
