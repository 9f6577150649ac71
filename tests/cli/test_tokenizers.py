"""`mdata tokenizers`: what it lists, and that every engine it measures gives the exact ids."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli import tokenizers as command
from cli.console import Command, run
from mdata.tokenizer_training import tokenizer_benchmark
from mdata.tokenizers.registry import available

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer"
FEW = [Path(tokenizer_benchmark.__file__)] * 3


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    monkeypatch.setattr(tokenizer_benchmark, "_files", lambda: FEW)
    # main() tells the library to use one thread; put back what was set.
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


def tokenizers(*words):
    return run(
        "mdata", [Command("tokenizers", "", module=command.__name__)], description="", argv=["tokenizers", *words]
    )


def test_without_a_tokenizer_one_of_each_kind_is_trained(capsys):
    assert tokenizers("--json") == 0
    facts = json.loads(capsys.readouterr().out)
    forms = {}
    for one in facts["measured"]:
        forms.setdefault(one["type"], []).append(one["engine"])
        assert (one["mb_per_s"] is None) == bool(one["why_not"])
    assert forms.pop("ByteTokenizer") == ["none"]
    assert forms == {type: facts["types"][type] for type in forms}
    assert list(forms) == ["GPT2BPETokenizer", "TikTokenizer", "BertWordPieceLowerCase", "Llama2Tokenizer",
                           "SentencePieceTokenizer"]  # fmt: skip
    # The exact engine of each is there; of the fast ones unigram's may be missing.
    missing = [(one["form"], one["engine"]) for one in facts["measured"] if one["why_not"]]
    assert set(missing) <= {("SentencePiece unigram", "mdata")}
    assert set(facts["types"]) == set(facts["needs"]) == set(available())
    assert {engine for engines in facts["types"].values() for engine in engines} == facts["engines"].keys()


def test_types_and_engines_are_listed_as_text(capsys):
    assert tokenizers("--tokenizer-type", "ByteTokenizer") == 0
    text = capsys.readouterr().out
    assert re.search(r"TikTokenizer +--tokenizer-model FILE, ranks in .json or .tiktoken +gigatoken, tiktoken\n", text)
    assert re.search(r"ByteTokenizer +nothing +needs none\n", text) and re.search(r"\nmdata +\d+\.\d+\.\d+", text)
    assert re.search(r"\nByteTokenizer +none +[\d,.e+]+ +0\n$", text)


def test_facts_as_json(capsys):
    model = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(GOLDEN)]
    assert tokenizers("--json", *model, "--vocab-size", "9") == 0
    out, err = capsys.readouterr()
    facts = json.loads(out)
    assert err == "mdata: --vocab-size has no effect for HuggingFaceTokenizer\n"
    assert facts["engines"].keys() == {"gigatoken", "tiktoken", "mdata", "tokenizers", "sentencepiece"}
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
