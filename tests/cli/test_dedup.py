"""`mdata dedup`: what it prints, and what it refuses."""

from __future__ import annotations

import json

import pytest

from cli.mdata import main

TEXTS = ["one two three four five six", "ONE two, three four five six.", "seven eight nine ten eleven"]


def test_it_says_what_was_found_and_what_comes_next(tmp_path, capsys):
    path, out = tmp_path / "a.jsonl", tmp_path / "out"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    assert main(["dedup", "--input", str(path), "--json-key", "body", "--output", str(out), "--exact"]) == 0
    printed = capsys.readouterr().out
    assert "1 of 3 rows (33.33 %) repeat earlier ones, 1 of them exactly; groups: 1" in printed
    assert f"next: mdata preprocess --skip-rows {out}" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--exact", "--bands", "3"], "--bands has no effect with --exact"),
        (["--bands", "0x"], "--bands"),
        (["--rows", "0"], "rows is 0"),
        (["--ngram", "lines:3"], "ngram is 'lines:3'"),
        (["--exact", "--verify", "0.5"], "--exact has nothing to verify"),
        (["--verify", "1.5"], "verify is 1.5"),
        (["--compat", "megatron", "--ngram", "3"], "--compat megatron decides --ngram"),
        (["--shard", "1/2"], "--shard 1/2 without a stage"),
        (["--shard", ""], "argument --shard: the value is empty"),
        (["--parts", "-1"], "--parts -1 without a stage\n  try: mdata dedup STAGE"),
        (["group", "--ranges", "-1"], "ranges is -1\n  expected: at least 1"),
        (["--workers", "-1"], "workers is -1"),
    ],
)
def test_what_it_refuses(words, message, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a b"}\n')
    assert main(["dedup", "--input", str(path), "--output", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err


def test_standard_input_is_refused(tmp_path, capsys):
    assert main(["dedup", "--input", "-", "--output", str(tmp_path / "out")]) == 2
    assert "cannot read standard input" in capsys.readouterr().err
