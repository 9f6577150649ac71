"""Corpora copied from object storage: the bytes of the corpus, however the copy was interrupted, and nothing else."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import pytest

import mdata
from cli.mdata import main
from mdata import DamageError, UsageError
from mdata.corpus import fetch as fetching
from mdata.corpus.fetch import fetch, manifest_address
from mdata.object_storage.address import parse_address
from mdata.object_storage.reading import read_range
from mdata.object_storage.uploading import put_file
from mdata.progress import Silent
from mdata.reporting.report import page_beside
from mdata.util import file_lock
from tests.helpers.examples import SOAK
from tests.helpers.failures import assert_what_is_visible_is_true, killed_at
from tests.helpers.object_server import answering
from tests.mdata.object_storage.test_preprocess_objects import put_folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a corpus whose .bin has three blocks; the tokenizer keeps no files."""
    folder = tmp_path_factory.mktemp("made")
    text = folder / "in.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"{number} {'words ' * 900}"}) for number in range(900)))
    out = folder / "out"
    out.mkdir()
    mdata.preprocess(
        mdata.PreprocessOptions(input=(str(text),), output_prefix=str(out / "c"), tokenizer_type="ByteTokenizer")
    )
    return out


@pytest.fixture
def corpus(bucket, made):
    """The address of the corpus' manifest."""
    put_folder(made, f"{bucket}/corpora")
    return f"{bucket}/corpora/{next(made.glob('*.json')).name}"


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stop_after(monkeypatch, blocks, *, act=None):
    """Let some blocks of the .bin through, then act, or fail as a process does that is interrupted."""
    read = []

    def limited(facts, start, *, stop, store=None):
        if facts.address.name.endswith(".bin"):
            if len(read) == blocks:
                if act is None:
                    raise KeyboardInterrupt
                act()
            read.append(start)
        return read_range(facts, start, stop=stop, store=store)

    monkeypatch.setattr(fetching, "read_range", limited)
    return read


def test_the_bytes_of_the_corpus(corpus, made, server, tmp_path):
    server.share = 0.2
    path = fetch(corpus.removesuffix(".json"), tmp_path / "copy", progress=Silent())
    assert content(path.parent) == content(made) and len(content(made)) >= 4
    assert mdata.verify(path, full=True).problems == ()


def test_a_tokenizer_comes_along(bucket, made, tmp_path):
    vocabulary = tmp_path / "in"
    vocabulary.mkdir()
    (vocabulary / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "words", "1"]))
    (tmp_path / "out").mkdir()
    result = mdata.preprocess(
        mdata.PreprocessOptions(
            input=(str(made.parent / "in.jsonl"),),
            output_prefix=str(tmp_path / "out/c"),
            tokenizer_type="BertWordPieceLowerCase",
            vocab_file=str(vocabulary / "vocab.txt"),
        )
    )
    put_folder(tmp_path / "out", f"{bucket}/t")
    path = fetch(f"{bucket}/t/{result.paths['text'].name}", tmp_path / "copy", progress=Silent())
    here = {name: data for name, data in content(tmp_path / "copy").items() if not name.endswith(".lock")}
    assert here == {name: data for name, data in content(tmp_path / "out").items() if not name.endswith(".lock")}
    assert any(name.startswith("tokenizer-") for name in here) and mdata.verify(path).problems == ()


def test_a_folder_stands_for_its_only_manifest(bucket, corpus, made, tmp_path):
    folder = corpus.rpartition("/")[0]
    assert content(fetch(f"{folder}/", tmp_path / "copy", progress=Silent()).parent) == content(made)
    name = next(made.glob("*.json")).name
    with pytest.raises(UsageError, match=r"does not name one corpus\n  found: no .json among 0 files"):
        fetch(bucket, tmp_path / "none", progress=Silent())
    put_file(made / name, parse_address(f"{folder}/other.json"), file_hash=None)
    with pytest.raises(UsageError, match=rf"found: {name}, other.json\n(.*\n)+  try: {folder}/{name}, or"):
        fetch(f"{folder}/", tmp_path / "two", progress=Silent())


def test_a_dataset_of_the_hub_that_is_a_corpus(made, monkeypatch, tmp_path):
    """The second example of the command's help."""
    files = {path.name: path.read_bytes() for path in made.iterdir()} | {"README.md": b"#"}

    def answer(request):
        if "/api/datasets/owner/name/tree/main" in request.path:
            return 200, {}, json.dumps([{"type": "file", "path": name} for name in files]).encode()
        return 200, {"ETag": '"1"'}, files[request.path.rpartition("/")[2]]

    monkeypatch.setenv("HF_ENDPOINT", answering(answer))
    hub = "hf://datasets/owner/name"
    path = fetch(hub, tmp_path / "copy", progress=Silent())
    assert content(path.parent) == content(made)
    opened = [mdata.open_dataset(at, sequence_length=8, cache=str(tmp_path)) for at in (path, hub)]
    assert opened[0].data_id == opened[1].data_id


@pytest.mark.parametrize("given", ["c", "c.json", "c.bin", "c.idx", "c.bin.json", "c.idx.bin", "c.json.idx"])
def test_one_ending_is_left_out(given):
    """A prefix may itself end like a file: the manifest of c.bin.bin and c.bin.idx is c.bin.json, on a disk too."""
    manifests = {"c.bin.json": "c.bin.json", "c.idx.bin": "c.idx.json", "c.json.idx": "c.json.json"}
    manifest = manifests.get(given, "c.json")
    assert str(manifest_address(parse_address(f"s3://b/{given}"))) == f"s3://b/{manifest}"
    assert page_beside(Path(given)).name == manifest.removesuffix("json") + "report.html"


@pytest.mark.parametrize("blocks", [0, 2])
def test_stopped_anywhere_it_continues(corpus, made, monkeypatch, tmp_path, blocks):
    monkeypatch.setattr(fetching, "_THREADS", 1)
    stop_after(monkeypatch, blocks)
    with pytest.raises(KeyboardInterrupt):
        fetch(corpus, tmp_path, progress=Silent())
    assert not [path for ending in ("json", "bin", "idx") for path in tmp_path.glob(f"[!.]*.{ending}")]
    again = stop_after(monkeypatch, 99)
    path = fetch(corpus, tmp_path, progress=Silent())
    assert len(again) == 3 - blocks
    assert content(tmp_path) == content(made) and mdata.verify(path, full=True).problems == ()


@pytest.mark.scaled
def test_killed_before_any_call_it_continues(corpus, made, monkeypatch, tmp_path):
    monkeypatch.setattr(fetching, "_THREADS", 1)
    for n in itertools.count(0, 1 if SOAK > 1 else 7):
        folder = tmp_path / str(n)
        if not killed_at(n, lambda folder=folder: fetch(corpus, folder, progress=Silent())):
            break
        assert_what_is_visible_is_true(folder)
        fetch(corpus, folder, progress=Silent())
        assert content(folder) == content(made), n
        shutil.rmtree(folder)
    assert n > 15


def test_what_a_stopped_fetch_left_goes_if_the_corpus_is_uploaded_anew(bucket, corpus, made, monkeypatch, tmp_path):
    """The new one has other shards; files of other fetches, and files with their final names, stay."""
    copy, old = tmp_path / "copy", next(made.glob("*.json"))
    monkeypatch.setattr(fetching, "_THREADS", 1)
    stop_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        fetch(corpus, copy, progress=Silent())
    assert {f".{old.stem}{ending}.partial" for ending in (".bin", ".idx")} <= {p.name for p in copy.iterdir()}
    (copy / ".theirs.bin.partial").write_bytes(b"theirs")
    mdata.preprocess(
        mdata.PreprocessOptions(
            input=(str(made.parent / "in.jsonl"),), output_prefix=str(tmp_path / "n"), tokenizer_type="ByteTokenizer"
        )
    )
    made_anew = next(tmp_path.glob("n*.json"))
    for file in tmp_path.glob("n*"):
        named = old.name if file == made_anew else file.name
        put_file(file, parse_address(f"{bucket}/corpora/{named}"), file_hash=None)
    stop_after(monkeypatch, 99)
    fetch(corpus, copy, progress=Silent())
    assert [path.name for path in copy.glob(".*")] == [".theirs.bin.partial"]
    assert mdata.verify(copy / old.name, full=True).problems == ()


def test_a_block_that_was_half_written_is_not_trusted(corpus, made, monkeypatch, tmp_path):
    monkeypatch.setattr(fetching, "_THREADS", 1)
    stop_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        fetch(corpus, tmp_path, progress=Silent())
    (partial,) = [path for path in tmp_path.iterdir() if ".bin" in path.name and not path.name.endswith(".blake3")]
    with partial.open("r+b") as file:
        file.seek((4 << 20) + 1000)
        file.write(b"\0" * 4096)
    again = stop_after(monkeypatch, 99)
    fetch(corpus, tmp_path, progress=Silent())
    assert again == [4 << 20, 8 << 20] and content(tmp_path) == content(made)


@pytest.mark.parametrize("name", ["bin", "idx"])
def test_an_object_that_is_not_as_written(corpus, made, tmp_path, name):
    other = tmp_path / "other"
    data = bytearray(next(made.glob(f"*.{name}")).read_bytes())
    data[-1] ^= 1
    other.write_bytes(data)
    put_file(other, parse_address(corpus.removesuffix("json") + name), file_hash=None)
    with pytest.raises(DamageError, match=rf"\.{name}: (block 2|its hash) does not match the manifest"):
        fetch(corpus, tmp_path / "copy", progress=Silent())
    assert not list((tmp_path / "copy").glob("*.json")) and not list((tmp_path / "copy").glob("*.bin"))


def test_an_object_that_changes_meanwhile(corpus, made, monkeypatch, tmp_path):
    other = tmp_path / "other"
    other.write_bytes(bytes(next(made.glob("*.bin")).stat().st_size))
    address = parse_address(corpus.removesuffix("json") + "bin")
    monkeypatch.setattr(fetching, "_THREADS", 1)
    stop_after(monkeypatch, 1, act=lambda: put_file(other, address, file_hash=None))
    with pytest.raises(UsageError, match=r"\.bin changed while it was read"):
        fetch(corpus, tmp_path / "copy", progress=Silent())
    assert not list((tmp_path / "copy").glob("*.json"))


@pytest.mark.parametrize("ending", ["json", "idx", "bin", "blake3"])
def test_files_of_others_are_kept(corpus, made, tmp_path, ending):
    shutil.copytree(made, tmp_path / "copy")
    theirs = next((tmp_path / "copy").glob(f"*.{ending}"))
    theirs.write_bytes(b"theirs" + theirs.read_bytes()[6:])
    before = content(tmp_path / "copy")
    with pytest.raises(UsageError, match=rf"\.{ending} already exists and differs from the corpus in storage"):
        fetch(corpus, tmp_path / "copy", progress=Silent())
    assert content(tmp_path / "copy") == before


def test_a_manifest_of_a_stranger_writes_nothing_outside(bucket, made, tmp_path):
    from msgspec.structs import replace

    from mdata.manifest.io import load_manifest, save_manifest

    manifest = load_manifest(next(made.glob("*.json")))
    shard = replace(manifest.shards[0], path="../outside")
    save_manifest(replace(manifest, shards=[shard]), tmp_path / "x.json")
    put_file(tmp_path / "x.json", parse_address(f"{bucket}/x.json"), file_hash=None)
    (tmp_path / "in").mkdir()
    with pytest.raises(UsageError, match=r"lies outside its folder|nothing is there"):
        fetch(f"{bucket}/x.json", tmp_path / "in/copy", progress=Silent())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "x.json"]


def test_one_process_at_a_time(corpus, tmp_path):
    with (
        file_lock.hold(tmp_path / f".{parse_address(corpus).name}.lock"),
        pytest.raises(UsageError, match="process"),
    ):
        fetch(corpus, tmp_path, progress=Silent())


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("x.json", "is a path"),
        ("https://h/x.json", "a web server does not list the files"),
        ("BUCKET/nothing.json", "nothing is there"),
        ("s3://nobucket/x.json", "there is no bucket nobucket|nothing is there"),
        ("BUCKET/blend.json", "is a blend"),
        ("BUCKET/a/../c.json", "no object can have this key"),
        ("BUCKET/bare", "bare.idx has no manifest beside it\n.*bare.json, with the hashes"),
    ],
)
def test_bad_addresses_on_the_command_line(bucket, corpus, made, tmp_path, capsys, address, text):
    import re

    manifest = next(made.glob("*.json"))
    assert main(["blend", str(manifest), "-o", str(tmp_path / "blend.json")]) == 0
    put_file(tmp_path / "blend.json", parse_address(f"{bucket}/blend.json"), file_hash=None)
    put_file(manifest.with_suffix(".idx"), parse_address(f"{bucket}/bare.idx"), file_hash=None)
    capsys.readouterr()
    assert main(["fetch", address.replace("BUCKET", bucket), "--output", str(tmp_path / "copy")]) == 2
    said = capsys.readouterr().err
    assert re.search(text, said) and said.count("\n") <= 4


def test_no_secret_is_left_or_said(corpus, tmp_path, capsys):
    assert main(["fetch", corpus, "--output", str(tmp_path / "copy")]) == 0
    said = "".join(capsys.readouterr())
    assert str(tmp_path / "copy") in said
    for secret in ("AKIDTOBEHIDDEN", "secrettobehidden"):
        assert secret not in said
        assert not any(secret.encode() in data for data in content(tmp_path).values())
