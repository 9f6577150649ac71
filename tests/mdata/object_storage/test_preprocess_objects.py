"""Preprocess with inputs and results in object storage: the bytes and ids of a run on a disk."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import subprocess
import sys
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import mdata
from cli.mdata import main
from mdata import ResourceError, UsageError
from mdata.manifest.io import load_manifest
from mdata.object_storage import stores, uploading
from mdata.object_storage.address import parse_address
from mdata.object_storage.reading import list_objects, look_at_object, read_range
from mdata.object_storage.uploading import put_file, remove_object
from mdata.preprocessing import uploads
from mdata.preprocessing.uploads import Uploads
from mdata.sources.input_files import find_inputs
from tests.helpers.examples import SOAK
from tests.helpers.failures import Killed, killed_at
from tests.helpers.house_rules import ROOT


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


RESULTS = {f"x_text_document{ending}" for ending in (".bin", ".idx", ".json", ".origins", ".blake3")}


def check_whole_or_absent(bucket, here):
    """A manifest is there only with all that it names, in the bytes of a run on a disk; whether it is."""
    found = {one.address.name for one in list_objects(parse_address(f"{bucket}/out/"))}
    whole = "x_text_document.json" in found
    assert not whole or found == RESULTS
    for name in found:  # an object is there as a whole or not at all
        assert stored(f"{bucket}/out/{name}") == (here.parent / name).read_bytes()
    return whole


@pytest.mark.parametrize("cuts", [4, pytest.param(50, marks=pytest.mark.soak)])
def test_an_upload_cut_at_any_byte_leaves_nothing_that_looks_finished(
    server, bucket, texts, tmp_path, monkeypatch, cuts
):
    """Whole files and files in parts; all cuts at places of their own, the last of them behind the last byte."""
    monkeypatch.setattr(uploading, "_SMALLEST_PART", 16_384)
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    run([texts], tmp_path / "x")
    again = partial(run, [texts], f"{bucket}/out/x", work_folder=str(tmp_path / "work"))
    server.received = 0
    again()
    sent = server.received
    assert check_whole_or_absent(bucket, tmp_path / "x")
    chance, finished = random.Random(11), 0
    for at in [*chance.sample(range(sent), cuts - 1), sent]:
        for one in list_objects(parse_address(f"{bucket}/out/")):
            remove_object(one.address)
        with monkeypatch.context() as patch:
            patch.setattr(stores, "RETRIES", 0)
            patch.setattr(uploading, "TRIES", 1)
            server.received, server.cut_at = 0, at
            with pytest.raises(ResourceError, match="run again"):
                again()
            server.cut_at = None
        finished += check_whole_or_absent(bucket, tmp_path / "x")
        again()
        assert check_whole_or_absent(bucket, tmp_path / "x")
    assert finished == 1  # where only the answer about the manifest was lost


def test_a_run_that_is_killed_while_it_uploads_goes_on(server, bucket, texts, tmp_path):
    words = ["--input", str(texts), "--tokenizer-type", "ByteTokenizer", "--workers", "1"]
    assert main(["preprocess", *words, "--output-prefix", str(tmp_path / "x")]) == 0
    words += ["--output-prefix", f"{bucket}/out/x", "--work-folder", str(tmp_path / "work")]
    command = [sys.executable, "-m", "cli.mdata", "preprocess", *words]
    for at in (0, 150_000, 300_000):
        server.received, server.refused, server.cut_at = 0, 0, at
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
            while not server.refused:  # from here on it tries again
                assert running.poll() is None
                time.sleep(0.01)
            running.kill()
        server.cut_at = None
        assert not check_whole_or_absent(bucket, tmp_path / "x")
    assert subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode == 0
    assert check_whole_or_absent(bucket, tmp_path / "x")


@pytest.mark.scaled
def test_a_run_that_is_killed_at_any_call_of_its_upload_leaves_nothing_in_the_end(bucket, texts, tmp_path, monkeypatch):
    """Neither there nor in the work folder, where a pair without its manifest would look like a corpus."""
    run([texts], tmp_path / "x")
    real, calls = Uploads.publish, [(uploads, "put_file"), (uploads, "remove_object")]
    again = partial(run, [texts], f"{bucket}/out/x", work_folder=str(tmp_path / "work"))
    for n in itertools.count(0, 1 if SOAK > 1 else 3):
        for one in list_objects(parse_address(f"{bucket}/out/")):
            remove_object(one.address)

        def publish(self, result, n=n):
            published = []
            if killed_at(n, lambda: published.append(real(self, result)), also=calls):
                raise Killed
            return published[0]

        with monkeypatch.context() as patch:
            patch.setattr(Uploads, "publish", publish)
            try:
                again()
                break
            except Killed:
                check_whole_or_absent(bucket, tmp_path / "x")
        again()
        assert check_whole_or_absent(bucket, tmp_path / "x")
        assert not list((tmp_path / "work").iterdir()), n
    assert n > 8


def test_no_secret_is_written_or_shown(server, bucket, texts, tmp_path, capfd, monkeypatch):
    """Neither in storage, nor in what is left of a run that broke off, nor in what it said."""
    put_folder(texts, f"{bucket}/in")
    words = ["--input", f"{bucket}/in/", "--output-prefix", f"{bucket}/out/x", "--work-folder", str(tmp_path / "work")]
    words += ["--tokenizer-type", "ByteTokenizer", "--workers", "1", "--debug"]
    monkeypatch.setattr(uploading, "TRIES", 1)
    monkeypatch.setattr(stores, "RETRIES", 0)
    server.received, server.cut_at = 0, 100_000
    assert main(["preprocess", *words]) not in (0, None)
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name.endswith(".idx") for path in left)
    server.cut_at = None
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "anothersecret")
    assert main(["preprocess", *words]) == 0
    out, err = capfd.readouterr()
    contents = [path.read_bytes() for path in left if path.exists()] + [out.encode(), err.encode()]
    contents += [stored(str(one.address)) for one in list_objects(parse_address(f"{bucket}/out/"))]
    assert "uploading" in err or "x_text_document" in err + out
    for content in contents:
        assert not any(word in content for word in (b"AKIDTOBEHIDDEN", b"secrettobehidden", b"anothersecret"))


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
        with pytest.raises(UsageError, match=rf"{address} is in object storage(.|\n)*mdata fetch"):
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
