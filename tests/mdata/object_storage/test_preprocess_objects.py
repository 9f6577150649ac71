"""Preprocess with inputs and results in object storage: the bytes and ids of a run on a disk."""

from __future__ import annotations

import gzip
import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mdata
from mdata import ResourceError, UsageError
from mdata.manifest.io import load_manifest
from mdata.object_storage import stores, uploading
from mdata.object_storage.address import parse_address
from mdata.object_storage.reading import list_objects, look_at_object, object_there, read_range
from mdata.object_storage.uploading import put_file, remove_object
from mdata.sources.input_files import find_inputs


@pytest.fixture
def texts(tmp_path):
    """A folder with each kind of input."""
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    lines = [json.dumps({"text": f"line {number} " * (number % 40)}) for number in range(3_000)]
    (folder / "a.jsonl").write_text("\n".join(lines[:2_000]))
    (folder / "sub/b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[2_000:]).encode()))
    pq.write_table(pa.table({"text": [f"row {n}" for n in range(500)]}), folder / "c.parquet", row_group_size=100)
    rows = pa.table({"text": [f"arrow {n}" for n in range(500)]})
    with pa.ipc.new_file(folder / "d.arrow", rows.schema) as writer:
        writer.write_table(rows, max_chunksize=100)
    (folder / ".hidden.jsonl").write_text("no\n")
    (folder / "empty.jsonl").write_text("")
    return folder


def put_folder(folder, address):
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            put_file(path, parse_address(f"{address}/{path.relative_to(folder)}"), file_hash=None)


def run(inputs, prefix, **changes):
    given = {"tokenizer_type": "ByteTokenizer", "chunk_bytes": 20_000, "workers": 1, **changes}
    return mdata.preprocess(mdata.PreprocessOptions(input=tuple(map(str, inputs)), output_prefix=str(prefix), **given))


def stored(text):
    facts = look_at_object(parse_address(text))
    return read_range(facts, 0, stop=facts.size_bytes)


@pytest.mark.parametrize("shard", [None, "1/3", "2/3", "3/3"])
def test_input_gives_the_bytes_of_a_disk(bucket, texts, tmp_path, shard):
    put_folder(texts, f"{bucket}/in")
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    here = run([texts], tmp_path / "one/x", shard=shard)
    there = run([f"{bucket}/in/"], tmp_path / "two/x", shard=shard, workers=2)
    assert here.manifests["text"].id == there.manifests["text"].id
    assert [m.shards for m in here.manifests.values()] == [m.shards for m in there.manifests.values()]
    recorded = there.paths["text"].read_text()
    assert f"{bucket}/in/a.jsonl" in recorded or shard
    assert "hidden" not in recorded.replace(".hidden", "")


def test_patterns_and_folders(bucket, texts, tmp_path):
    put_folder(texts, f"{bucket}/in")
    names = lambda text: [file.path.name for file in find_inputs([text]).files]  # noqa: E731
    everything = ["a.jsonl", "c.parquet", "d.arrow", "empty.jsonl", "b.jsonl.gz"]
    assert names(f"{bucket}/in") == names(f"{bucket}/in/") == everything
    assert names(f"{bucket}/in/*.jsonl") == [".hidden.jsonl", "a.jsonl", "empty.jsonl"]
    assert names(f"{bucket}/**/b*") == ["b.jsonl.gz"]
    with pytest.raises(UsageError, match="no object matches"):
        names(f"{bucket}/in/*.txt")
    with pytest.raises(UsageError, match="no input in this folder"):
        names(f"{bucket}/nothing/")
    with pytest.raises(UsageError, match="nothing is there"):
        names(f"{bucket}/in/z.jsonl")


def test_results_in_storage_and_a_second_run(bucket, texts, tmp_path):
    here = run([texts], tmp_path / "x")
    there = run([texts], f"{bucket}/out/x", work_folder=str(tmp_path / "work"))
    assert str(there.paths["text"]) == f"{bucket}/out/x_text_document.json"
    for path in tmp_path.glob("x_text_document*"):
        assert stored(f"{bucket}/out/{path.name}") == path.read_bytes()
    assert here.manifests == there.manifests
    assert not list((tmp_path / "work").iterdir())
    assert run([texts], f"{bucket}/out/x", work_folder=str(tmp_path / "work")).finished_before
    with pytest.raises(UsageError, match="other results already exist"):
        run([texts / "a.jsonl"], f"{bucket}/out/x", work_folder=str(tmp_path / "work"))
    again = run([texts / "a.jsonl"], f"{bucket}/out/x", work_folder=str(tmp_path / "work"), overwrite=True)
    assert not again.finished_before
    remove_object(parse_address(f"{bucket}/out/x_text_document.bin"))
    assert not run([texts / "a.jsonl"], f"{bucket}/out/x", work_folder=str(tmp_path / "work")).finished_before
    assert stored(f"{bucket}/out/x_text_document.bin")


def test_an_upload_that_breaks_off_continues(server, bucket, texts, tmp_path, monkeypatch):
    again = partial(run, [texts], f"{bucket}/out/x", work_folder=str(tmp_path / "work"))
    manifest = parse_address(f"{bucket}/out/x_text_document.json")
    with monkeypatch.context() as patch:
        patch.setattr(stores, "RETRIES", 0)
        patch.setattr(uploading, "TRIES", 1)
        for requests in range(2, 10):
            server.requests, server.cut_after = 0, requests
            with pytest.raises(ResourceError, match="run again"):
                again()
            server.cut_after = None
            if object_there(manifest):  # it is the last: only the answer about it was lost
                break
    assert requests > 5
    assert again().finished_before  # tokenized by the first run
    assert {one.address.name for one in list_objects(parse_address(f"{bucket}/out/"))} == {
        f"x_text_document{ending}" for ending in (".bin", ".idx", ".json", ".origins", ".bin.blake3")
    }


def test_no_secret_is_written(bucket, texts, tmp_path):
    put_folder(texts, f"{bucket}/in")
    run([f"{bucket}/in"], f"{bucket}/out/x", work_folder=str(tmp_path / "work"))
    for one in list_objects(parse_address(f"{bucket}/out/")):
        content = read_range(one, 0, stop=one.size_bytes)
        assert b"AKIDTOBEHIDDEN" not in content and b"secrettobehidden" not in content


@pytest.mark.parametrize(
    ("prefix", "how", "text"),
    [
        ("s3://b/x", {}, "no work folder is named"),
        ("hf://datasets/a/b/x", {"work_folder": "w"}, "does not write to hf://"),
        ("x", {"work_folder": "w"}, "work_folder=w has no effect"),
    ],
)
def test_options_that_do_not_fit(texts, prefix, how, text):
    with pytest.raises(UsageError, match=text):
        run([texts], prefix, **how)


@pytest.mark.parametrize("scheme", ["s3", "gs", "https", "hdfs"])
def test_corpora_and_blends_are_opened_from_a_disk(scheme):
    address = f"{scheme}://b/x.json"
    for opened in (mdata.open_corpus, mdata.open_blend, load_manifest):
        with pytest.raises(UsageError, match=f"{address} is in object storage, and corpora are opened from a disk"):
            opened(Path(address))


class _Hub(BaseHTTPRequestHandler):
    """The endpoints of the hub that are used: the tree in pages, and files by ranges through a redirect."""

    def log_message(self, *args):
        """Nothing."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        folder = self.server.folder
        path, _, query = self.path.partition("?")
        if path.startswith("/api/"):
            return self._tree(folder, path, query)
        if path.startswith("/datasets/"):
            assert self.headers["Authorization"] == "Bearer hub-token"
            return self._answer(302, b"", Location="/files/" + path.split("/resolve/v1/")[1])
        data = (folder / path.removeprefix("/files/")).read_bytes()
        begin, _, end = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        part = data[int(begin) : int(end or len(data)) + 1]
        whole = f"bytes {begin}-{int(begin) + len(part) - 1}/{len(data)}"
        if self.headers.get("Range"):
            return self._answer(206, part, **{"Content-Range": whole, "ETag": '"v"'})
        return self._answer(200, part, ETag='"v"')

    def _tree(self, folder, path, query):
        assert path == "/api/datasets/o/n/tree/v1" and "recursive=true" in query
        files = sorted(one for one in folder.rglob("*") if one.is_file())
        page = int(query.partition("cursor=")[2] or 0)
        entries = [{"type": "file", "path": str(one.relative_to(folder)), "size": 1} for one in files[page::2]]
        follows = f'<{self.server.url}/api/datasets/o/n/tree/v1?recursive=true&cursor=1>; rel="next"'
        return self._answer(200, json.dumps(entries).encode(), **({} if page else {"Link": follows}))

    def _answer(self, status, body, **headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@pytest.fixture
def hub(texts, monkeypatch):
    pytest.importorskip("obstore")
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    server.folder, server.url = texts, f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", "hub-token")
    yield server
    server.shutdown()


def test_dataset_repositories_and_web_servers(hub, texts, tmp_path):
    here = run([texts], tmp_path / "x").manifests["text"]
    assert run(["hf://datasets/o/n@v1/"], tmp_path / "hub/x").manifests["text"].shards == here.shards
    one = run([texts / "a.jsonl"], tmp_path / "x", overwrite=True).manifests["text"]
    assert run([f"{hub.url}/files/a.jsonl"], tmp_path / "web/x").manifests["text"].shards == one.shards
    with pytest.raises(UsageError, match="a web server does not say which files it has"):
        run([f"{hub.url}/files/"], tmp_path / "none/x")
