from __future__ import annotations

import json
import os

import pytest

from mdata.errors import ResourceError, UsageError
from mdata.object_storage import hub as hub_module
from mdata.object_storage.address import parse_address
from mdata.object_storage.hub import hub_files
from tests.helpers.object_server import answering

FOLDER = parse_address("hf://datasets/o/n/t/")
ENTRIES = json.dumps([{"type": "file", "path": "t/a.jsonl"}, {"type": "directory", "path": "t"}]).encode()


@pytest.fixture
def hub(monkeypatch):
    """Serves a hub that answers as told; gives the headers of what it was asked."""
    monkeypatch.setenv("HF_TOKEN", "TOBEHIDDEN")

    def start(answer):
        seen = []
        url = answering(lambda request: seen.append(request) or answer(request, url))
        monkeypatch.setenv("HF_ENDPOINT", url)
        return seen

    return start


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_token_does_not_follow_a_redirect_of_the_list(hub, host, scheme):
    elsewhere = []
    other = answering(lambda request: elsewhere.append(request) or (200, {}, ENTRIES))
    location = other.replace("127.0.0.1", host).replace("http:", f"{scheme}:")
    hub(lambda request, url: (302, {"Location": f"{location}/list?sig=TOBEHIDDEN"}, b""))
    with pytest.raises(UsageError, match="redirects to another host") as refused:
        hub_files(FOLDER)
    assert f"302 to {location}" in str(refused.value) and "TOBEHIDDEN" not in str(refused.value)
    assert not elsewhere


def test_a_user_without_a_home_folder_has_no_token(hub, monkeypatch, tmp_path):
    """As in a container with a user id that /etc/passwd does not name."""
    for name in ("HOME", "HF_HOME", "HF_TOKEN", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: (1 << 32) - 7)
    seen = hub(lambda request, url: (200, {}, ENTRIES))
    assert hub_files(FOLDER)
    assert "Authorization" not in seen[-1].headers
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "token").write_text("TOBEHIDDEN")
    assert hub_files(FOLDER)
    assert seen[-1].headers["Authorization"] == "Bearer TOBEHIDDEN"


def test_a_renamed_repository_is_followed_on_the_hub_with_the_token(hub):
    seen = hub(
        lambda request, url: (
            (307, {"Location": "/api/datasets/o/new/tree/main/t?recursive=true"}, b"")
            if "/o/n/" in request.path
            else (200, {}, ENTRIES)
        )
    )
    assert hub_files(FOLDER) == ["t/a.jsonl"]
    assert [request.headers["Authorization"] for request in seen] == ["Bearer TOBEHIDDEN"] * 2


def test_a_split_of_a_converted_data_set(hub):
    entries = json.dumps([{"type": "file", "path": "default/train/0000.parquet"}]).encode()
    seen = hub(lambda request, url: (200, {}, entries))
    address = parse_address("hf://datasets/o/n@~parquet/default/train/")
    assert hub_files(address) == ["default/train/0000.parquet"]
    assert seen[0].path == "/api/datasets/o/n/tree/refs%2Fconvert%2Fparquet/default/train?recursive=true"
    assert hub_module.hub_url(address).endswith("/datasets/o/n/resolve/refs%2Fconvert%2Fparquet")
    assert str(address) == "hf://datasets/o/n@~parquet/default/train/"


def test_redirects_in_a_circle_end(hub):
    seen = hub(lambda request, url: (307, {"Location": request.path}, b""))
    with pytest.raises(UsageError, match="redirects"):
        hub_files(FOLDER)
    assert len(seen) < 20


def test_a_page_that_comes_again_ends_the_list(hub):
    seen = hub(lambda request, url: (200, {"Link": f'<{url}{request.path}>; rel="next"'}, ENTRIES))
    with pytest.raises(ResourceError, match="the list does not end"):
        hub_files(FOLDER)
    assert len(seen) == 1


def test_pages_without_end_are_bounded(hub, monkeypatch):
    monkeypatch.setattr(hub_module, "_MOST_PAGES", 5)
    seen = hub(lambda request, url: (200, {"Link": f'<{url}/{len(request.path)}{request.path}>; rel="next"'}, b"[]"))
    with pytest.raises(ResourceError, match="more than 5 pages"):
        hub_files(FOLDER)
    assert len(seen) == 5


@pytest.mark.parametrize("body", [b"x" * 101, b"{}", b"[1]", b'[{"type": "file"}]', b"[" * 99, b"<html>"])
def test_what_is_no_page_is_refused(hub, monkeypatch, body):
    monkeypatch.setattr(hub_module, "_PAGE_BYTES", 100)
    hub(lambda request, url: (200, {}, body))
    if body == b"{}":  # an empty page
        assert hub_files(FOLDER) == []
        return
    with pytest.raises(ResourceError):
        hub_files(FOLDER)
