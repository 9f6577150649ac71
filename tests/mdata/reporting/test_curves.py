"""The drawn shares and epochs are those of the samples that a blend gives."""

from __future__ import annotations

import numpy as np
import pytest

import mdata
from mdata.blend_planning.preview import BlendRow
from mdata.reporting.curves import MOST_BANDS, bands_of, curves_of
from tests.helpers.corpora import write_pair


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    for name, count in (("a", 100), ("b", 50), ("c", 25)):
        write_pair(tmp_path / f"{name}_text_document", [[10]] * count)
    monkeypatch.chdir(tmp_path)


def test_curves_are_what_a_dataset_reads(corpora):
    entries = [{"path": f"{name}_text_document", "weight": n} for name, n in (("a", 2), ("b", 1), ("c", 1))]
    phases = [{"samples": 40}, {"samples": 400, "ramp": True, "shares": {"c": 1}}, {"shares": {"a": 1, "b": 3}}]
    blend = mdata.make_blend({"component": entries, "phase": phases}, "mix.json")
    curves = curves_of(mdata.preview_blend(blend, sequence_length=8, samples=700))
    data = mdata.open_dataset("mix.json", sequence_length=8, split="train", split_shares="100,0,0")
    components, _ = data.locate(np.arange(700))
    assert curves.phases == ((0, False), (40, True), (440, False))
    assert (curves.edges[0], curves.edges[-1]) == (0, 700)
    assert len(curves.edges) == 3 + 6, "a ramp of 400 samples is six intervals"
    parts = np.split(components, curves.edges[1:-1])
    for band, shares in zip(curves.bands, curves.shares, strict=True):
        assert shares.tolist() == [np.isin(part, band.members).mean() for part in parts]
    for number, epochs in enumerate(curves.epochs):
        size = data.components[number].samples.samples_per_epoch
        assert epochs.tolist() == [np.sum(components[:edge] == number) / size for edge in curves.edges]


def rows(count, group=lambda i: None):
    whole = count * (count + 1) / 2
    return [BlendRow(f"n{i}", "1", (i + 1) / whole, 10, 1, None, group(i)) for i in range(count)]


def members(bands):
    return sorted(i for band in bands for i in band.members)


@pytest.mark.parametrize("count", [1, 2, 12, 13, 14, 300])
@pytest.mark.parametrize("groups", [0, 1, 3, 20])
def test_every_component_is_in_one_band(count, groups):
    bands = bands_of(rows(count, lambda i: f"g{i % groups}" if groups and i % 7 else None))
    assert members(bands) == list(range(count))
    assert len([band for band in bands if len(band.members) == 1 and band.colour is not None]) <= MOST_BANDS + 1
    assert len(bands) <= MOST_BANDS + 7
    assert all(0 < band.strength <= 1 for band in bands)


def test_the_largest_are_drawn_alone_and_groups_stand_together():
    bands = bands_of(rows(300))
    assert [band.members[0] for band in bands[:-1]] == list(range(299, 287, -1))
    assert bands[-1].name == "288 others"
    groups = [band.group for band in bands_of(rows(100, lambda i: f"g{i % 3}")) if band.group]
    assert groups == sorted(groups, key=groups.index)
    assert any(band.name == "g0: 30 others" for band in bands_of(rows(100, lambda i: f"g{i % 3}")))
