"""`mdata inspect`: how a corpus was made, and its first documents."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cli.inspect import _lengths_text
from cli.mdata import main

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS = ['{"text": "one"}', "not JSON", '{"text": ["two.", "three<|endoftext|>"]}', '{"text": 4}', '{"text": ""}']


def make(tmp_path: Path) -> Path:
    """Three documents of five rows; one is empty, one has two sentences."""
    (tmp_path / "x.jsonl").write_text("\n".join(ROWS) + "\n")
    named = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(GOLDEN / "tokenizer")]
    prefix = ["--input", str(tmp_path / "x.jsonl"), "--output-prefix", str(tmp_path / "o")]
    assert main(["preprocess", *prefix, *named, "--on-error", "skip", "--workers", "1"]) == 0
    return tmp_path / "o_text_document.json"


@pytest.fixture
def corpus(tmp_path) -> Path:
    return make(tmp_path)


def test_preprocess_tells_what_it_left_out(tmp_path, capsys):
    make(tmp_path)
    err = capsys.readouterr().err.splitlines()
    assert "mdata: 2 of 5 rows left out: 1 bad-value, 1 not-json" in err
    assert any(line.startswith("mdata: special tokens in the texts: 1;") for line in err)


def test_provenance_and_origins(corpus, capsys):
    capsys.readouterr()
    assert main(["inspect", str(corpus)]) == 0
    out = capsys.readouterr().out
    assert "from 1 input: 5 rows, " in out
    assert "rows left out: 1 bad-value, 1 not-json\n" in out and "special tokens in the texts: 1\n" in out
    assert f"document 0 from {corpus.parent}/x.jsonl:1: " in out
    assert f"document 1 from {corpus.parent}/x.jsonl:3: " in out and " in 2 sequences\n'two.three<|endoftext|>'" in out
    assert f"document 2 from {corpus.parent}/x.jsonl:5: 0 tokens\n''" in out
    assert main(["inspect", str(corpus), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["provenance"]["skipped"] == {"bad-value": 1, "not-json": 1}
    assert facts["provenance"]["inputs"][0]["rows"] == 5 and facts["provenance"]["special_in_text"] == 1
    assert [document["origin"].rpartition(":")[2] for document in facts["first_documents"]] == ["1", "3", "5"]
    assert facts["bin_bytes"] == 2 * facts["tokens"]


def test_a_lost_tokenizer_hides_only_the_text(corpus, capsys):
    (folder,) = corpus.parent.glob("tokenizer-*")
    shutil.rmtree(folder)
    capsys.readouterr()
    assert main(["inspect", str(corpus)]) == 0
    out, err = capsys.readouterr()
    assert "documents" in out and "(no tokenizer is known)" in out
    assert err.startswith("mdata: o: its tokenizer is missing")
    assert main(["inspect", str(corpus.parent)]) == 2
    assert f"name a corpus in it, such as {corpus.with_suffix('')}" in capsys.readouterr().err


def test_a_corpus_of_an_interrupted_run_is_to_be_continued(tmp_path, capsys):
    (tmp_path / ".o_text_document.bin.partial").touch()
    assert main(["inspect", str(tmp_path / "o_text_document")]) == 2
    assert "if it was interrupted, run it again" in capsys.readouterr().err


def test_an_empty_input_is_told_in_one_line(tmp_path, capsys):
    (tmp_path / "x.jsonl").write_text("")
    named = ["--tokenizer-type", "ByteTokenizer", "--output-prefix", str(tmp_path / "o")]
    assert main(["preprocess", "--input", str(tmp_path / "x.jsonl"), *named]) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mdata: ")]
    assert notes == ["mdata: the input has no records; the corpus is empty"]
    assert main(["inspect", str(tmp_path / "o_text_document")]) == 0
    assert main(["verify", "--full", str(tmp_path / "o_text_document")]) == 0


def test_lengths_in_words():
    assert _lengths_text([2, 0, 0, 5, 1]) == "2 of 0, 5 of 4-7, 1 of 8-15 tokens"
    assert _lengths_text([0, 3]) == "3 of 1 token"
    assert _lengths_text([]) == "no documents" and _lengths_text(None) is None
