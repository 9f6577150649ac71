"""Counts of one in messages: "1 row", never "1 rows"."""

import json
import re

import pytest

from cli.mdata import main
from mdata.errors import counted

# A count of one before a word that ends in s; "2.1 tokens" and "0.1 samples" are not counts of one.
ONE_OF_MANY = re.compile(r"(?<![\d.,])1 (?!is\b|has\b|was\b|less\b)[a-z]+s\b")


def test_counted():
    assert [counted(n, "row") for n in (0, 1, 2, 1000)] == ["0 rows", "1 row", "2 rows", "1,000 rows"]
    assert [counted(n, "row is", "rows are") for n in (1, 2)] == ["1 row is", "2 rows are"]
    assert counted(2, "entry", "entries") == "2 entries"


@pytest.fixture
def one_of_each(tmp_path):
    """A folder with a text file of one row and its corpus of one document."""
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    (tmp_path / "bad.jsonl").write_text("{\n")
    words = ["--output-prefix", str(tmp_path / "one"), "--tokenizer-type", "ByteTokenizer", "--workers", "1"]
    assert main(["preprocess", "--input", str(tmp_path / "one.jsonl"), *words]) == 0
    return tmp_path


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("inspect one_text_document.json", "from 1 input: 1 row"),
        ("inspect one_text_document.json --documents 0", "1 token"),
        ("cat one_text_document.json --documents 0,0", "1 token <=="),
        ("verify one_text_document.json --full", "one_text_document"),
        ("trace one_text_document.json --document 0 --sequence-length 1", "1 token in 1 sequence"),
        ("clean --input one.jsonl --output kept --steps fix", "1 of 1 row kept"),
        ("dedup --input one.jsonl --output repeats", "of 1 row ("),
        (
            "preprocess --input bad.jsonl --output-prefix b --tokenizer-type ByteTokenizer --on-error skip",
            "1 of 1 row left out: 1 not-json",
        ),
    ],
)
def test_one_of_each(one_of_each, monkeypatch, capsys, command, expected):
    monkeypatch.chdir(one_of_each)
    main(command.split())
    printed = "".join(capsys.readouterr())
    assert expected in printed
    assert not ONE_OF_MANY.search(printed)
