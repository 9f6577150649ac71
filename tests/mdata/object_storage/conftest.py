"""A bucket on loopback for the tests of this folder, which are skipped where moto or obstore is missing."""

from __future__ import annotations

import os
import urllib.request

import pytest

from tests.helpers.object_server import ObjectServer


@pytest.fixture(scope="session")
def server():
    pytest.importorskip("obstore")
    pytest.importorskip("moto.server")
    server = ObjectServer()
    yield server
    server.shutdown()


@pytest.fixture
def bucket(server, monkeypatch, tmp_path):
    """The address of an empty bucket; credentials are in the environment, as the AWS tools take them."""
    server.denied, server.drops = set(), lambda method, path: False
    server.share, server.cut_at, server.received, server.refused, server.requests = 0.0, None, 0, 0, 0
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in (
        ("AWS_ENDPOINT_URL", server.url),
        ("AWS_ACCESS_KEY_ID", "AKIDTOBEHIDDEN"),
        ("AWS_SECRET_ACCESS_KEY", "secrettobehidden"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
        ("HOME", str(tmp_path)),
    ):
        monkeypatch.setenv(name, value)
    name = f"bucket{abs(hash(tmp_path)) % 10**12}"
    urllib.request.urlopen(urllib.request.Request(f"{server.url}/{name}", method="PUT")).close()
    yield f"s3://{name}"
    server.forget()
