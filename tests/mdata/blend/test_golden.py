"""Blends made before manifests said who set each share: their manifests are read, and ids and orders stay.

tests/golden/blends.json was written by the code at that time: specs, manifests, data ids and orders.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

import mdata
from mdata.blend.compose import plan_blend
from tests.conftest import ROOT
from tests.helpers.corpora import write_pair

GOLDEN = json.loads((ROOT / "tests" / "golden" / "blends.json").read_text())
BLENDS = GOLDEN["blends"]


@pytest.fixture
def corpora(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "web").mkdir()
    for name, (documents, length) in GOLDEN["corpora"].items():
        write_pair(tmp_path / name, [[length]] * documents)
    return tmp_path


def order_of(data):
    """A hash of which sample comes from where, and of its tokens."""
    places = [np.ascontiguousarray(part, np.int64).tobytes() for part in data.locate(np.arange(data.num_samples))]
    tokens = data.read(np.arange(data.num_samples)).tokens.astype(np.int64).tobytes()
    return hashlib.sha256(b"".join(places) + tokens).hexdigest()[:16]


def assert_as_before(blend, known):
    assert blend.manifest.id == known["manifest"]["id"]
    assert mdata.Dataset(blend, mdata.DatasetOptions(sequence_length=8)).data_id == known["native"]
    for asked, (num_samples, data_id, order) in known["megatron"].items():
        wanted = None if asked == "None" else int(asked)
        data = mdata.Dataset(
            blend, mdata.DatasetOptions(sequence_length=8, num_samples=wanted, order=mdata.MegatronOrder())
        )
        assert (data.num_samples, data.data_id, order_of(data)) == (num_samples, data_id, order), asked


@pytest.mark.parametrize("known", BLENDS, ids=[str(known["spec"]) for known in BLENDS])
def test_ids_and_orders_of_blends_stay(corpora, known):
    spec = known["spec"]
    assert_as_before(plan_blend(spec.split() if isinstance(spec, str) else spec, corpora), known)
    (corpora / "old.json").write_text(json.dumps(known["manifest"]))
    old = mdata.open_blend(corpora / "old.json")
    assert_as_before(old, known)
    assert mdata.preview_blend(old, samples=40, sequence_length=8).rows
