"""Megatron's fingerprints, pairs and groups; a case that is wrong is told."""

from __future__ import annotations

import json

import pytest

from tests.oracles.webtext_groups import differs

KEYS = ("lsh_seeds", "fingerprints", "deduped", "pairs_union_1", "groups_max_1_0.9")


@pytest.mark.parametrize("name", ["main", "second"])
def test_cases_are_equal_and_changed_ones_are_not(name, oracles):
    folder = oracles / "oracle" / "webtext" / name
    told = json.loads((folder / "megatron.json").read_text())
    texts = [json.loads(line)["text"] for line in (folder / "corpus.jsonl").read_text().splitlines()]
    assert {key: differs(key, told, texts) for key in KEYS} == dict.fromkeys(KEYS, "")
    if name != "main":
        return
    wrong = {
        "lsh_seeds": told["lsh_seeds"][1:],
        "fingerprints": {**told["fingerprints"], "0": "00" * 400},
        "pairs_union_1": [[0, 1, 0.9]],
        "groups_max_1_0.9": told["groups_max_1_0.9"][1:],
    }
    assert all(differs(key, {**told, key: value}, texts) for key, value in wrong.items())
    assert differs("pairs_mean_1", told, texts) == "unknown kind: pairs_mean_1"
