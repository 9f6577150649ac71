"""Verification names each damaged part and goes on to the next."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from blake3 import blake3

import mdata
from mdata import manifest
from tests.helpers.manifests import some_corpus
from tests.mdata.preprocess.test_preprocess import run

BLOCK = 4 << 20


def problems(path: Path, *, full: bool = True) -> list[str]:
    return [str(problem) for problem in mdata.verify(path, full=full).problems]


@pytest.fixture
def corpus(tmp_path) -> Path:
    run(tmp_path, append_eod=True)
    return tmp_path / "out_text_document.json"


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "text", "without_full"),
    [
        ("out_text_document.bin", "out_text_document.bin: block 0 is not what was written", False),
        ("out_text_document.bin.blake3", "the block hashes are not what was written", True),
        ("out_text_document.json", "not whole JSON|not what was written|is not a manifest|at `", True),
    ],
)
def test_a_flipped_bit_is_found(corpus, name, text, without_full):
    flip(corpus.parent / name, 20)
    (found,) = problems(corpus)
    assert re.search(text, found)
    assert bool(problems(corpus, full=False)) == without_full


def test_damage_of_an_index_is_found(corpus):
    index = corpus.parent / "out_text_document.idx"
    size = index.stat().st_size
    original = index.read_bytes()
    for place in range(0, size, 13):
        flip(index, place)
        assert problems(corpus, full=False), place
        index.write_bytes(original)
    assert problems(corpus) == []


def test_a_lost_file_is_found(corpus):
    for name in ("out_text_document.bin", "out_text_document.bin.blake3", "out_text_document.idx"):
        path = corpus.parent / name
        data = path.read_bytes()
        path.unlink()
        assert any(name in problem for problem in problems(corpus)), name
        path.write_bytes(data)


def test_another_tokenizer_in_its_folder_is_found(corpus):
    (folder,) = corpus.parent.glob("tokenizer-*")
    (folder / "tokenizer_config.json").write_text("{}")
    (found,) = problems(corpus)
    assert "is not the tokenizer of out" in found


def test_the_damaged_block_is_named(tmp_path):
    with mdata.IndexedWriter(tmp_path / "x", np.dtype(np.uint16)) as writer:
        tokens = np.zeros(5 << 20, np.uint16)
        writer.append(tokens, np.array([len(tokens)]), document_ends=np.array([1]))
        facts = writer.finish()
    sidecar = b"".join(facts.block_hashes)
    (tmp_path / "x.bin.blake3").write_bytes(sidecar)
    shard = msgspec.structs.replace(
        mdata.open_corpus(tmp_path / "x").manifest.shards[0],
        idx_hash=facts.idx_hash,
        blocks=manifest.BlockHashes(path="x.bin.blake3", hash=blake3(sidecar).hexdigest()),
    )
    manifest.save(msgspec.structs.replace(some_corpus(), tokenizer=None, shards=[shard]), tmp_path / "x.json")
    assert problems(tmp_path / "x.json") == []
    flip(tmp_path / "x.bin", BLOCK + 7)
    flip(tmp_path / "x.bin", 2 * BLOCK + 7)
    first, second = problems(tmp_path / "x")
    assert f"block 1 is not what was written (bytes {BLOCK} to {2 * BLOCK})" in first
    assert f"block 2 is not what was written (bytes {2 * BLOCK} to {10 << 20})" in second


def test_a_blend_verifies_its_corpora(corpus):
    mix = corpus.parent / "mix.json"
    mdata.make_blend([str(corpus)], mix)
    found = mdata.verify(mix, full=True)
    assert found.checked == (str(mix), str(corpus))
    assert found.problems == () and found.bin_bytes > 0
    run(corpus.parent)
    (problem,) = problems(mix)
    assert "is not the corpus that was blended" in problem
