"""`mdata train-tokenizer` from the command line: preprocess accepts the options that it prints."""

from __future__ import annotations

import json
import shlex

import pytest

import mdata
from cli.mdata import main

SIZES = {"byte-bpe": 290, "wordpiece": 60, "sentencepiece-bpe": 50, "sentencepiece-unigram": 30}


@pytest.fixture
def text(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    words = [a + b + c for a in ("st", "br", "l") for b in ("a", "o") for c in ("n", "nd", "ver", "ck")]
    lines = [" ".join(words[(i * k + i * i) % len(words)] for k in range(1, 12)) for i in range(200)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in lines) + "{}\n")
    return "x.jsonl"


@pytest.mark.parametrize("kind", SIZES)
def test_what_is_printed_works(text, tmp_path, capsys, kind):
    """Every line that is printed, given to preprocess as it is."""
    read = ["--input", text, "--json-keys", "body", "--on-error", "skip"]
    words = ["train-tokenizer", *read, "--kind", kind, "--vocab-size", str(SIZES[kind]), "--output", "my tok"]
    assert main(words) == 0
    heard = capsys.readouterr()
    assert "skipped 1 row that cannot be used; the first: x.jsonl:201: no key 'body'" in heard.err
    first, *lines = heard.out.splitlines()
    assert first.startswith(f"my tok: {SIZES[kind]} entries, end of document ")
    documents = set()
    for number, line in enumerate(lines):
        _, _, command = line.partition("mdata preprocess ")
        given = ["--output-prefix", f"o{number}", "--workers", "1", "--append-eod"]
        assert main(["preprocess", *read, *given, *shlex.split(command)]) == 0
        corpus = mdata.open_corpus(f"o{number}_body_document")
        assert corpus.num_documents == 200
        documents.add(tuple(corpus.document(7).tolist()))
    assert len(lines) >= 2 and len(documents) == 1


def test_json_and_again(text, capsys):
    words = ["train-tokenizer", "--input", text, "--json-keys", "body", "--on-error", "skip", "--vocab-size", "270"]
    assert main([*words, "--output", "a", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["kind"], facts["vocab_size"], facts["eod"], facts["there_before"]) == ("byte-bpe", 270, 0, False)
    assert main([*words, "--output", "a"]) == 0
    assert "(the same tokenizer already existed)" in capsys.readouterr().out
    assert main([*words, "--output", "a", "--vocab-size", "280"]) == 2
    heard = capsys.readouterr().err
    assert "holds another tokenizer" in heard and "a already contains tokenizer.json; --overwrite replaces it" in heard
    assert main([*words, "--output", "a", "--vocab-size", "280", "--overwrite"]) == 0


@pytest.mark.parametrize(("words", "message"), [
    (["--kind", "byte-bpe", "--lower-case"], "lower_case has no meaning for byte-bpe"),
    (["--on-error", "stop"], "x.jsonl:201: no key 'body'"),
    (["--json-keys", "nothing"], "x.jsonl:1: no key 'nothing'"),
])  # fmt: skip
def test_what_cannot_be(text, tmp_path, capsys, words, message):
    given = ["--input", text, "--vocab-size", "300", "--output", "a"]
    keys = [] if "--json-keys" in words else ["--json-keys", "body"]
    assert main(["train-tokenizer", *given, *keys, *words]) in (2, 3)
    heard = capsys.readouterr().err
    assert message in heard and not (tmp_path / "a").exists()
