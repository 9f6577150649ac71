"""From the TOML file through `mdata blend` and a manifest to a loader's batches: shares are met at each phase's end.

The blend's own arithmetic is not used: corpora are recognized by their tokens.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import mdata
from cli.mdata import main
from mdata import Loader
from mdata.loader.loader import BatchPlan
from tests.helpers.corpora import write_pair

S, BATCH, RANKS = 8, 30, 2
TOML = """
[[component]]
path = "a"
weight = 0.6
{cap}
[[component]]
path = "b"
weight = 0.3
[[component]]
path = "c"
weight = 0.1

[[phase]]
samples = 1000
[[phase]]
samples = 500
ramp = true
shares = {{ a = 0.2, b = 0.3, c = 0.5 }}
[[phase]]
tokens = 12000
shares = {{ b = 2, c = 1 }}
"""
ENDS = (1000, 1500, 3000)
# Asked for until each end: constant shares, a straight line from them to others, others again.
ASKED = np.cumsum([[600, 300, 100], [200, 150, 150], [0, 1000, 500]], axis=0)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    for number, name in enumerate("abc"):
        count = 100 + 60 * number
        write_pair(tmp_path / name, [[9]] * count, tokens=np.arange(9 * count) + 100_000 * number)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blend(folder: Path, *words: str, cap: str = "") -> int:
    (folder / "mix.toml").write_text(TOML.format(cap=cap))
    return main(["blend", "mix.toml", "-o", "mix.json", *words])


def test_achieved_shares_are_within_one_sample_at_the_end_of_each_of_three_phases(folder, capsys):
    assert blend(folder, "--json", "--sequence-length", str(S), "--samples", "3000") == 0
    told = json.loads(capsys.readouterr().out)
    data = mdata.open_dataset(folder / "mix.json", sequence_length=S)
    loaders = [iter(Loader(data, BatchPlan(BATCH, 5, dp_rank=r, dp_size=RANKS))) for r in range(RANKS)]
    corpus = np.full(3000, -1)
    for _ in range(3000 // BATCH):
        for batch in (batch for loader in loaders for batch in next(loader)):
            owners = batch.tokens // 100_000
            assert (owners == owners[:, :1]).all()
            assert (corpus[batch.samples] == -1).all()
            corpus[batch.samples] = owners[:, 0]
    for loader in loaders:
        with pytest.raises(StopIteration):  # the blend ends with its last phase
            next(loader)
    for end, asked in zip(ENDS, ASKED, strict=True):
        achieved = np.bincount(corpus[:end], minlength=3)
        assert achieved.sum() == end
        assert (np.abs(achieved - asked) < 1).all(), (end, achieved, asked)
    assert [row["samples"] for row in told["components"]] == np.bincount(corpus).tolist()


def test_a_cap_that_cannot_be_met_fails_with_numbers_before_and_at_opening(folder, capsys):
    assert blend(folder, "--sequence-length", str(S), cap="max_epochs = 4") == 2
    early = capsys.readouterr().err
    per_epoch = mdata.open_dataset(folder / "a", sequence_length=S).components[0].samples.samples_per_epoch
    for number in (4, 800, 4 * per_epoch):
        assert re.search(rf"\b{number}\b", early), (number, early)
    assert not (folder / "mix.json").exists()
    # Made without the length of a sample nothing can be said yet; then opening says it.
    mdata.make_blend("mix.toml", folder / "mix.json")
    with pytest.raises(mdata.UsageError, match=rf"\b{4 * per_epoch}\b"):
        mdata.open_dataset(folder / "mix.json", sequence_length=S)
    assert blend(folder, "--sequence-length", str(S), cap="max_epochs = 8") == 0
