"""`mdata tokenizers`: what it lists, and that engines it measures are those that are equal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli import tokenizers as command
from cli.console import Command, run
from mdata.tokenizers import speed

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer"
FEW = [Path(speed.__file__)] * 3


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    monkeypatch.setattr(speed, "_files", lambda: FEW)
    # main() tells the library to use one thread; put back what was set.
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def tokenizers(*words):
    return run(
        "mdata", [Command("tokenizers", "", module=command.__name__)], description="", argv=["tokenizers", *words]
    )


def test_without_a_tokenizer_one_is_learnt(capsys):
    assert tokenizers() == 0
    text = capsys.readouterr().out
    assert "GPT2BPETokenizer" in text and re.search(r"ByteTokenizer +needs none", text)
    lines = {line.split()[0]: line.split() for line in text.split("why not\n")[1].splitlines()}
    assert list(lines) == ["gigatoken", "tiktoken", "mdata", "tokenizers"]
    assert lines.pop("mdata")[1] == "-"  # what is learnt is no WordPiece
    assert all(float(words[1].replace(",", "")) > 0 for words in lines.values())


def test_facts_as_json(capsys):
    model = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(GOLDEN)]
    assert tokenizers("--json", *model, "--vocab-size", "9") == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert err == "mdata: --vocab-size changes nothing for HuggingFaceTokenizer\n"
    assert facts["engines"].keys() == {"gigatoken", "tiktoken", "mdata", "tokenizers"}
    assert facts["types"]["NullTokenizer"] == []
    assert [one["engine"] for one in facts["measured"]] == ["gigatoken", "tiktoken", "mdata", "tokenizers"]
    assert facts["measured"].pop(2)["why_not"] == "its model is BPE, not WordPiece"
    assert all(one["text_bytes"] == 3 * FEW[0].stat().st_size for one in facts["measured"])


def test_an_engine_that_is_not_equal_tells_why(tmp_path, capsys):
    known = json.loads((GOLDEN / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**known, "normalizer": {"type": "Lowercase"}}))
    assert tokenizers("--json", "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)) == 0
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert [(one["mb_per_s"] is None, one["why_not"]) for one in measured] == [
        (True, "it normalizes texts"),
        (True, "it normalizes texts"),
        (True, "its model is BPE, not WordPiece"),
        (False, None),
    ]


@pytest.mark.parametrize("words", [["NullTokenizer", "--vocab-size", "70"], ["ByteTokenizer"]])
def test_types_without_a_library(words, capsys):
    assert tokenizers("--json", "--tokenizer-type", *words) == 0
    (one,) = json.loads(capsys.readouterr().out)["measured"]
    assert one["engine"] == "none" and one["mb_per_s"] > 0


def test_a_tokenizer_that_cannot_be_loaded(capsys):
    assert tokenizers("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/none") == 2
    assert "no folder or file /none" in capsys.readouterr().err
