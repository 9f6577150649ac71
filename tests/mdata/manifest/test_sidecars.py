"""The names of sidecars: scans of a folder by other programs pass over them, and the older name is still read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import msgspec
import pytest

import mdata
from mdata.corpus.adopt import adopt
from mdata.corpus.verify import verify
from mdata.errors import UsageError
from mdata.manifest.io import load_manifest, save_manifest
from mdata.rewriting.merge import merge
from mdata.tokenizers.registry import build_tokenizer
from tests.helpers.corpora import write_pair


def refused_by_a_scan(folder: Path) -> list[str]:
    """The files that stop tools which merge a folder: each file must be of a pair, by its name without its ending."""
    refused = []
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        pair = {path.with_suffix(".bin"), path.with_suffix(".idx")}
        refused += [] if all(part.is_file() for part in pair) else [path.name]
    return refused


def written(folder: Path, **more: object) -> Path:
    source = folder.parent / "in.jsonl"
    source.write_text("".join(f'{{"text": "document {n}", "b": "{n}"}}\n' for n in range(40)))
    options = {"tokenizer_type": "ByteTokenizer", "workers": 1, "append_eod": True, **more}
    mdata.preprocess(mdata.PreprocessOptions(input=(str(source),), output_prefix=str(folder / "x"), **options))
    return folder / "x_text_document.json"


def as_older(path: Path) -> None:
    """Give a corpus the names that it had before."""
    made = load_manifest(path)
    prefix = path.with_suffix("")
    prefix.with_name(f"{prefix.name}.blake3").rename(f"{prefix}.bin.blake3")
    (shard,) = made.shards
    blocks = msgspec.structs.replace(shard.blocks, path=f"{prefix.name}.bin.blake3")
    save_manifest(msgspec.structs.replace(made, shards=[msgspec.structs.replace(shard, blocks=blocks)]), path)


def test_a_scan_of_a_folder_that_mdata_wrote(tmp_path):
    first = written(tmp_path / "out", json_keys=("text", "b"), partitions=2, holdout="0.1")
    for number in (1, 2):
        written(tmp_path / "parts", shard=f"{number}/2")
    merge(str(tmp_path / "parts" / "x"), copy=True)
    assert len(list((tmp_path / "out").glob("*.blake3"))) >= 6
    assert refused_by_a_scan(tmp_path / "parts") == []
    assert refused_by_a_scan(tmp_path / "out") == []
    as_older(first)
    assert refused_by_a_scan(tmp_path / "out") == ["x_text_document.bin.blake3"]


@pytest.mark.parametrize("copy", [False, True])
def test_older_corpora_are_read_verified_merged_and_moved(tmp_path, copy):
    for number in (1, 2):
        written(tmp_path / "a", shard=f"{number}/2")
    (older,) = (tmp_path / "a").glob("x-00001*.json")
    before = load_manifest(older).id
    as_older(older)
    shutil.move(tmp_path / "a", tmp_path / "moved")
    older = tmp_path / "moved" / older.name
    assert load_manifest(older).id == before
    assert verify(older, full=True).problems == ()
    (merged,) = merge(str(tmp_path / "moved" / "x"), copy=copy)
    assert verify(merged.path, full=True).problems == ()
    older.with_name(f"{older.stem}.bin.blake3").write_bytes(bytes(32))
    assert "bin.blake3: its content was changed" in str(verify(older).problems[0])


def test_a_replaced_result_leaves_no_sidecar_of_the_older_name(tmp_path):
    path = written(tmp_path / "out")
    as_older(path)
    assert written(tmp_path / "out", overwrite=True, append_eod=False) == path
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {f"x_text_document{ending}" for ending in (".bin", ".idx", ".json", ".origins", ".blake3")}


def test_adopting_again_keeps_the_older_name(tmp_path):
    prefix = written(tmp_path / "out").with_suffix("")
    for ending in (".json", ".blake3", ".origins"):
        prefix.with_name(prefix.name + ending).unlink()
    made = adopt(prefix, None, full=True)
    as_older(made.path)
    again = adopt(prefix, None, full=True)
    assert again.there_before and again.manifest.id == made.manifest.id
    assert {path.name for path in (tmp_path / "out").glob("*.blake3")} == {"x_text_document.bin.blake3"}
    assert verify(made.path, full=True).problems == ()


@pytest.mark.parametrize("name", ["sub/x.blake3", "../x.blake3"])
def test_a_name_elsewhere_is_no_place_for_a_sidecar(tmp_path, name):
    """A manifest may come from a stranger."""
    prefix = tmp_path / "c" / "x"
    prefix.parent.mkdir()
    write_pair(prefix, [[2], [1]])
    path = adopt(prefix, None, full=True).path
    made = load_manifest(path)
    shard = made.shards[0]
    blocks = msgspec.structs.replace(shard.blocks, path=name)
    save_manifest(msgspec.structs.replace(made, shards=[msgspec.structs.replace(shard, blocks=blocks)]), path)
    with pytest.raises(UsageError, match=r"lies outside its folder|No such file"):
        adopt(prefix, None, full=True)
    assert {file.name for file in tmp_path.rglob("*")} == {"c", "x.bin", "x.idx", "x.json", "x.blake3"}


def test_the_id_that_begins_a_text_is_kept_and_no_part_of_the_corpus_id(tmp_path):
    folder = tmp_path / "tokenizer"
    mdata.train_tokenizer([written(tmp_path / "bytes").parent.parent / "in.jsonl"], folder, vocab_size=300)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    found = []
    for name, begins in (("without", {}), ("with", {"bos_token": "<|endoftext|>"}), ("odd", {"bos_token": "<none>"})):
        (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "bos_token": None, **begins}))
        options = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
        found.append(load_manifest(written(tmp_path / name, **options)))
    without, begun, odd = found
    eod = begun.tokenizer.eod
    assert (without.tokenizer.bos, begun.tokenizer.bos, odd.tokenizer.bos) == (msgspec.UNSET, eod, msgspec.UNSET)
    assert without.id == begun.id == odd.id and "bos" not in msgspec.to_builtins(without.tokenizer)


@pytest.mark.parametrize(
    ("name", "options", "bos"),
    [("ByteTokenizer", {}, None), ("NullTokenizer", {"vocab_size": 9}, None)],
)
def test_a_tokenizer_without_one_has_no_id_that_begins_a_text(name, options, bos):
    assert build_tokenizer(name, {}, options=options).bos is bos
