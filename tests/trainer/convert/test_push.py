"""Uploads to a hub on loopback: what it gets, what an interrupted upload does not send again, and refusals."""

from __future__ import annotations

import base64
import hashlib
import json
from urllib.parse import urlparse

import pytest

from cli.mtrain import main
from mdata import ResourceError, UsageError
from tests.helpers.object_server import answering
from tests.trainer.convert.hf_models import save
from trainer.convert.push import check_push, push, repository_of

constants = pytest.importorskip("huggingface_hub.constants")
TOKEN = "TOBEHIDDEN"


class Hub:
    """One repository of a hub: large files by LFS, small ones in the commit.

    Attributes:
        private: of the repository; None: it does not exist. files: of its last commit. stored: objects by sha256.
        breaks: answers 500 to the n-th stored object and all later ones.
    """

    def __init__(self):
        self.private, self.files, self.stored, self.breaks, self.created = None, {}, {}, None, []
        self.url = answering(self.answer)

    def answer(self, request):
        status, found = self.found(request, urlparse(request.path).path)
        code = {"X-Error-Code": "RepoNotFound"} if status == 404 else {}
        return status, {"Content-Type": "application/json", **code}, json.dumps(found).encode()

    def found(self, request, path):
        if path.startswith("/stored/"):
            if self.breaks is not None and len(self.stored) >= self.breaks:
                return 500, {}
            self.stored[path.removeprefix("/stored/")] = request.body
            return 200, {}
        if request.headers["Authorization"] != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        if path == "/api/whoami-v2":
            return 200, {"name": "me", "type": "user"}
        if path == "/api/repos/create":
            asked = json.loads(request.body)
            self.created.append(asked)
            if self.private is not None:
                return 409, {"url": f"{self.url}/me/model"}
            self.private = asked["visibility"] == "private"
            return 200, {"url": f"{self.url}/me/model"}
        if path == "/api/models/me/model":
            return (404, {}) if self.private is None else (200, {"id": "me/model", "private": self.private})
        if path.startswith("/api/models/me/model/preupload/"):
            names = [file["path"] for file in json.loads(request.body)["files"]]
            modes = {True: "lfs", False: "regular"}
            files = [{"path": n, "uploadMode": modes[n.endswith(".safetensors")], "shouldIgnore": False} for n in names]
            return 200, {"files": files}
        if path == "/me/model.git/info/lfs/objects/batch":
            objects = [
                {k: one[k] for k in ("oid", "size")} | self.action(one["oid"])
                for one in json.loads(request.body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if path.startswith("/api/models/me/model/commit/"):
            for line in map(json.loads, request.body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[value["path"]] = self.stored[value["oid"]]
            return 200, {"commitUrl": f"{self.url}/me/model/commit/abc", "commitOid": "abc", "success": True}
        return 404, {}

    def action(self, oid):
        return {} if oid in self.stored else {"actions": {"upload": {"href": f"{self.url}/stored/{oid}"}}}


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    made = Hub()
    monkeypatch.setenv("HF_ENDPOINT", made.url)
    return made


def test_a_converted_folder_is_private_on_the_hub(hub, tmp_path, capsys):
    save("llama2", tmp_path / "theirs", shard="40KB")
    words = ["convert", str(tmp_path / "theirs"), str(tmp_path / "hf"), "--to", "hf", "--no-check"]
    words += ["--max-shard-size", "40KB", "--push", "hf://me/model"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "uploaded to hf://me/model" in out and TOKEN not in out + err
    assert hub.private is True
    written = {file.name: file.read_bytes() for file in (tmp_path / "hf").iterdir()}
    assert written.pop("conversion.json") and hub.files == written and len(hub.stored) > 1
    hub.files, before = {}, dict(hub.stored)
    assert main(words) == 0 and hub.files == written and hub.stored == before
    assert "nothing is left to do" in capsys.readouterr().err


def _folder(path):
    path.mkdir()
    for number in range(3):
        (path / f"model-{number}.safetensors").write_bytes(bytes([number]) * 2000)
    (path / "config.json").write_text("{}")
    return path


def test_an_interrupted_upload_is_continued(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    folder, hub.breaks = _folder(tmp_path / "hf"), 1
    with pytest.raises(ResourceError, match=r"status 500(.|\n)*it continues"):
        push(folder, "hf://me/model", public=False, tell=lambda _: None)
    assert len(hub.stored) == 1 and not hub.files
    (first,) = hub.stored
    hub.breaks, hub.stored[first] = None, b"kept"
    push(folder, "hf://me/model", public=False, tell=lambda _: None)
    sums = {hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.glob("*.safetensors")}
    assert hub.stored.keys() == sums and hub.stored[first] == b"kept" and len(hub.files) == 4


def test_a_public_repository_is_asked_for(hub, tmp_path):
    check_push("hf://me/model", public=False)
    push(_folder(tmp_path / "hf"), "hf://me/model", public=True, tell=lambda _: None)
    assert hub.private is False
    with pytest.raises(UsageError, match="hf://me/model is public"):
        check_push("hf://me/model", public=False)
    check_push("hf://me/model", public=True)


@pytest.mark.parametrize("token", ["another", ""])
def test_an_unknown_token_is_refused_before_the_conversion(hub, tmp_path, monkeypatch, capsys, token):
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    save("llama2", tmp_path / "theirs", tokens=False)
    words = ["convert", str(tmp_path / "theirs"), str(tmp_path / "hf"), "--to", "hf", "--push", "hf://me/model"]
    assert main(words) == 2
    told = capsys.readouterr().err
    assert ("no Hugging Face token" if not token else "status 401") in told and "hf auth login" in told
    assert not (tmp_path / "hf").exists() and not hub.created


@pytest.mark.parametrize("address", ["me/model", "hf://model", "hf://datasets/me/model", "hf://me/model/x", "s3://a/b"])
def test_what_is_no_model_on_the_hub_is_refused(address):
    with pytest.raises(UsageError, match="is not a model on the hub"):
        repository_of(address)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--to", "mtrain", "--push", "hf://me/model"], "--push would be ignored"),
        (["--to", "hf", "--public"], "--public would be ignored"),
    ],
)
def test_an_option_of_uploads_that_would_be_ignored_is_refused(tmp_path, capsys, words, named):
    assert main(["convert", str(tmp_path), str(tmp_path / "there"), *words]) == 2
    assert named in capsys.readouterr().err
