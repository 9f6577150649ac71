"""Objects are read and written whole or not at all, whatever the network does."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import ResourceError, UsageError
from mdata.object_storage import reading, stores, uploading
from mdata.object_storage.address import is_address, parse_address
from mdata.object_storage.reading import (
    ObjectFile,
    blocks_ahead,
    list_objects,
    look_at_object,
    object_there,
    read_range,
)
from mdata.object_storage.uploading import MOST_PARTS, part_bytes, put_file, put_stream, remove_objects


def put(tmp_path, address, data, file_hash=None):
    path = tmp_path / "put.bin"
    path.write_bytes(data)
    put_file(path, parse_address(address), file_hash=file_hash)
    return parse_address(address)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("s3://b/a/c.gz", ("s3", "b", "a/c.gz")),
        ("S3A://b/a", ("s3", "b", "a")),
        ("https://h.org:80/a/b", ("https", "h.org:80", "a/b")),
        ("hf://datasets/o/n/data/x.parquet", ("hf", "o/n", "data/x.parquet")),
        ("hf://datasets/o/n@v1/x", ("hf", "o/n@v1", "x")),
    ],
)
def test_addresses(text, parts):
    found = parse_address(text)
    assert (found.scheme, found.place, found.key) == parts
    assert parse_address(str(found)) == found


@pytest.mark.parametrize(
    "text",
    [
        "https://u:hidden@h/x",
        "https://h/x?X-Amz-Signature=hidden",
        "s3://k:hidden@b/x",
        "az://c/x?sv=1&sig=hidden",
        "gs://b/x?X-Goog-Signature=hidden",
        "hf://datasets/o/n/x?token=hidden",
    ],
)
def test_an_address_with_a_secret_is_refused_without_repeating_it(text):
    with pytest.raises(UsageError, match="user name, query or fragment") as caught:
        parse_address(text)
    assert "hidden" not in str(caught.value)


def test_an_upload_whose_last_answer_is_lost_is_sent_again(bucket, server, monkeypatch, tmp_path):
    """The server has completed it, so the request to complete it once more is refused (404 NoSuchUpload)."""
    requests = []

    def fault():
        requests.append(None)
        return "short" if len(requests) == 5 else None  # begin, three parts, complete

    monkeypatch.setattr(server, "fault", fault)
    data = random.Random(3).randbytes(17 << 20)
    address = put(tmp_path, f"{bucket}/y", data)
    assert read_range(look_at_object(address), 0, stop=len(data)) == data and len(requests) > 10


def test_a_storage_that_cannot_be_reached_is_said(bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(ResourceError, match=r"x: the storage cannot be reached\n  found: no connection\n") as caught:
        look_at_object(parse_address(f"{bucket}/x"))
    assert "127.0.0.1" not in str(caught.value) and "TOBEHIDDEN" not in str(caught.value)


def test_paths_are_not_addresses():
    assert not any(map(is_address, ["a/b", "s3:/b", "-", "c:x", "/s3://b"]))


@given(st.integers(0, 5 << 40))
def test_no_limit_of_parts_binds(size):
    part = part_bytes(size)
    assert -(-size // part) <= MOST_PARTS < 10_000
    assert 5 << 20 <= part <= 4_000 << 20 and part % (1 << 20) == 0


def test_an_upload_in_parts_is_read_back(bucket, tmp_path, monkeypatch):
    data = os.urandom(18 << 20)
    address = put(tmp_path, f"{bucket}/dir/x.bin", data, "abc")
    facts = look_at_object(address)
    assert facts.etag.endswith('-3"') and facts.size_bytes == len(data)
    assert b"".join(blocks_ahead(facts)) == data
    assert b"".join(blocks_ahead(facts, 5 << 20)) == data[5 << 20 :]
    file = ObjectFile(facts)
    for at, count in ((0, 10), ((4 << 20) - 3, 9), (len(data) - 4, 10), (len(data), 3)):
        file.seek(at)
        assert file.read(count) == data[at : at + count]
    assert [one.address for one in list_objects(parse_address(f"{bucket}/di"))] == [address]
    assert not put_file(tmp_path / "put.bin", address, file_hash="abc")


def test_a_list_whose_answer_breaks_off_is_asked_for_again(server, bucket, tmp_path, monkeypatch):
    """obstore repeats requests that fail, but not answers that end early."""
    monkeypatch.setattr(stores, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(reading, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(server, "slow_s", 0.0)
    put(tmp_path, f"{bucket}/there", b"x")
    server.share = 0.3
    before = server.faults["short"]
    for _ in range(60):
        assert [one.size_bytes for one in list_objects(parse_address(f"{bucket}/there"))] == [1]
    server.share = 0.0
    assert server.faults["short"] > before + 3


@pytest.mark.parametrize("faults", [30, pytest.param(200, marks=pytest.mark.soak)])
def test_faults_are_survived(server, bucket, tmp_path, monkeypatch, faults):
    monkeypatch.setattr(stores, "TIMEOUT_S", 1)
    monkeypatch.setattr(stores, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(reading, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(reading, "BLOCK_BYTES", 16 << 10)
    monkeypatch.setattr(uploading, "part_bytes", lambda size: 5 << 20)
    data = os.urandom(1 << 20)
    address = put(tmp_path, f"{bucket}/x", data)
    facts = look_at_object(address)
    server.faults.clear()
    server.share = 0.5
    while server.faults.total() < faults or len(server.faults) < 4:
        assert b"".join(blocks_ahead(facts)) == data
    assert min(server.faults[kind] for kind in ("reset", "503", "short", "slow")) > 0
    put(tmp_path, f"{bucket}/y", data * 12)
    server.share = 0.0
    assert read_range(look_at_object(parse_address(f"{bucket}/y")), 0, stop=12 << 20) == data * 12


def test_an_upload_killed_anywhere_leaves_nothing_or_all(server, bucket, tmp_path, monkeypatch):
    """At 50 bytes of a file in five parts, and of the messages that begin and end it."""
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr(stores, "RETRIES", 0)
    monkeypatch.setattr(uploading, "TRIES", 1)
    monkeypatch.setattr(uploading, "part_bytes", lambda size: 16_384)
    monkeypatch.setattr(uploading, "PARTS_AT_ONCE", 1)
    path = tmp_path / "x"
    path.write_bytes(os.urandom(4 * 16_384 + 1))
    server.received = 0
    put_file(path, parse_address(f"{bucket}/whole"), file_hash="abc")
    sent = server.received
    assert sent > path.stat().st_size
    there_anyway = 0
    for at in [*random.Random(5).sample(range(sent), 48), sent - 1, sent]:
        address = parse_address(f"{bucket}/{at}")
        server.received, server.cut_at = 0, at
        with pytest.raises(ResourceError):
            put_file(path, address, file_hash="abc")
        server.cut_at = None
        there = object_there(address)
        there_anyway += there is not None
        assert there is None or read_range(there, 0, stop=there.size_bytes) == path.read_bytes()
    assert there_anyway == 1, "only the answer to the last message was lost"


@pytest.mark.parametrize("size", [0, 1_000, 3 * 16_384 + 5])
def test_a_stream_is_there_when_it_has_ended(server, bucket, monkeypatch, size):
    """In one piece and in parts; begun again where the network fails; its own error leaves nothing."""
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    monkeypatch.setattr(stores, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(uploading, "part_bytes", lambda size: 16_384)
    data, address = os.urandom(size), parse_address(f"{bucket}/x")
    parts = [data[at : at + 7_000] for at in range(0, size, 7_000)]

    def broken():
        yield from map(memoryview, parts)
        raise StreamEnded

    with pytest.raises(StreamEnded):
        put_stream(broken, address, size_bytes=size)
    assert object_there(address) is None
    server.share = 0.2
    put_stream(lambda: iter(map(memoryview, parts)), address, size_bytes=size)
    server.share = 0.0
    assert read_range(look_at_object(address), 0, stop=size) == data
    put_stream(lambda: [b"other"], parse_address(f"{bucket}/y"), size_bytes=5)
    remove_objects([address, parse_address(f"{bucket}/y"), parse_address(f"{bucket}/none")])
    assert list_objects(parse_address(f"{bucket}/")) == []


class StreamEnded(Exception):
    pass


def test_an_object_that_changes_is_named(bucket, tmp_path):
    address = put(tmp_path, f"{bucket}/x", b"one" * 100)
    facts = look_at_object(address)
    put(tmp_path, str(address), b"two" * 100)
    with pytest.raises(UsageError, match=f"{address} changed while it was read"):
        read_range(facts, 0, stop=10)


def test_what_is_not_there_is_named(bucket):
    for text in (f"{bucket}/none", "s3://nosuchbucket/x"):
        with pytest.raises(UsageError, match="nothing is there"):
            look_at_object(parse_address(text))
    with pytest.raises(UsageError, match="no bucket nosuchbucket"):
        list_objects(parse_address("s3://nosuchbucket/x/"))


def test_no_credentials_are_told_at_once(bucket, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setattr(stores, "RETRIES", 0)
    with pytest.raises(UsageError, match="no credentials for s3://") as caught:
        look_at_object(parse_address(f"{bucket}/x"))
    assert "AWS_PROFILE" in str(caught.value)


def test_a_profile_is_read_as_the_aws_tools_do(tmp_path):
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[me]\naws_access_key_id = a\naws_secret_access_key = b%c\n")
    (tmp_path / ".aws/config").write_text("[profile me]\nregion = eu-west-1\nendpoint_url = http://e\n")
    found = stores.aws_config({"HOME": str(tmp_path), "AWS_PROFILE": "me"})
    expected = {"access_key_id": "a", "secret_access_key": "b%c", "region": "eu-west-1", "endpoint": "http://e"}
    assert found == expected
    assert stores.aws_config({"HOME": str(tmp_path)}) == {}
    given = {"HOME": str(tmp_path), "AWS_PROFILE": "me", "AWS_ACCESS_KEY_ID": "x", "AWS_REGION": "y"}
    assert stores.aws_config(given) == {"endpoint": "http://e"}


def test_calls_share_a_connection_until_a_setting_changes(bucket, monkeypatch, tmp_path):
    def store(key="x"):
        return stores.open_store(parse_address(f"{bucket}/{key}"))

    first = store()
    assert store("y") is first
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)  # as in a fork, which has none of the threads
        assert store() is not first
    assert store() is first
    monkeypatch.setenv("AWS_SESSION_TOKEN", "another")
    assert store() is not first
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    seen = [first]
    for key in ("one", "two"):  # keys that are replaced in a file
        (tmp_path / ".aws").mkdir(exist_ok=True)
        (tmp_path / ".aws/credentials").write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n")
        seen.append(store())
        assert store() is seen[-1]
    assert len(set(map(id, seen))) == 3
