"""A run whose corpora are in object storage is the run on the same corpora on a disk, bit for bit."""

from __future__ import annotations

import dataclasses
import os
import urllib.request

import pytest

from tests.helpers.object_server import ObjectServer
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import make_mix
from tests.trainer.run.test_train import Corpora, _config, _curve, _train

pytest.importorskip("obstore")
pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def address():
    """A server on loopback."""
    server = ObjectServer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "x")
        patch.setenv("AWS_REGION", "us-east-1")
        urllib.request.urlopen(urllib.request.Request(f"{server.url}/corpora", method="PUT")).close()
        yield "s3://corpora"
    server.shutdown()


def _train_there(context, config, environment):
    """In a process that was started before the server was."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return _train(context, config)


def test_losses_are_those_of_the_disk(address, tmp_path):
    from tests.mdata.object_storage.test_preprocess_objects import put_folder

    (tmp_path / "made").mkdir()
    made = make_mix(tmp_path / "made", ["first", "second", "held"])
    here = Corpora(tmp_path / "made", tmp_path / "made/mix.json", made["held"])
    put_folder(here.folder, f"{address}/made")
    there = Corpora(here.folder, f"{address}/made/mix.json", f"{address}/made/{made['held'].name}")
    config = _config(there, tmp_path / "there", steps=10)
    cached = dataclasses.replace(config.data, cache=str(tmp_path / "cache"), cache_size="1 GiB")
    run_ranks(_train, 2, _config(here, tmp_path / "here", steps=10))
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    run_ranks(_train_there, 2, dataclasses.replace(config, data=cached), environment)
    found, expected = (_curve(tmp_path / name) for name in ("there", "here"))
    assert found == expected and expected[10][2] is not None
