"""`mdata clean`: what it prints, its options for every threshold, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.mdata import main


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    texts = ["one two  three", "one", "{ one two three", "four five six"]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_it_says_what_became_of_the_rows(source, tmp_path, capsys):
    words = ["clean", "--input", str(source), "--output", str(tmp_path / "out"), "--steps", "length", "collapse"]
    assert main([*words, "--length-min-words", "3", "--removed", str(tmp_path / "removed.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert "3 of 4 rows kept, 1 of them changed; removed: 1 (25.00 %)\n  1  length-min-words\n" in printed
    assert [json.loads(line)["text"] for line in (tmp_path / "out/a.jsonl").read_text().splitlines()] == [
        "one two three",
        "{ one two three",
        "four five six",
    ]
    assert json.loads((tmp_path / "removed.jsonl").read_text())["row"] == 2


def test_the_next_stage_is_silent_about_the_report_of_this_one(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/a.html").write_text(f"<html><body><p>{'one two three four ' * 20}</p></body></html>")
    tokenize = "--output-prefix tokens --tokenizer-type ByteTokenizer"

    def silent(*lines: str) -> None:
        for line in lines:
            assert main(line.split()) == 0, line
            assert "skipped input" not in capsys.readouterr().err, line

    silent(
        "extract --input pages --output extract",
        "clean --input extract --output clean --steps fix",
        "decontaminate --input clean --against a.jsonl --output decontaminate",
    )
    row = json.loads((tmp_path / "decontaminate/a.jsonl").read_text())
    (tmp_path / "scores.jsonl").write_text(json.dumps({"id": row["id"], "score": 0.1}) + "\n")
    silent(
        "filter --input decontaminate --by scores.jsonl --keep-lowest 1.0 --output filter",
        "dedup --input filter --output dedup",
        "train-tokenizer --input filter --output tokenizer --vocab-size 270",
        f"preprocess --input filter --skip-rows dedup {tokenize}",
        f"preprocess --input filter/* {tokenize} --overwrite",
        f"preprocess --input filter --include * {tokenize} --overwrite",
    )
    assert sorted(path.parent.name for path in tmp_path.glob("*/*.report")) == [
        "clean", "decontaminate", "extract", "filter",
    ]  # fmt: skip
    (tmp_path / "filter/a.jsonl").unlink()
    assert main(["preprocess", "--input", "filter/*", *tokenize.split()]) == 2
    assert "no file matches this pattern\n  try: check the folder" in capsys.readouterr().err


def test_rows_only_says_what_comes_next(source, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["clean", "--input", str(source), "--output", str(out), "--steps", "length", "--rows-only"]
    assert main([*words, "--length-min-words", "3"]) == 0
    assert f"next: mdata preprocess --skip-rows {out}" in capsys.readouterr().out


def test_rules_of_c4_can_be_left_out(source, tmp_path):
    words = ["clean", "--input", str(source), "--output", str(tmp_path / "out"), "--steps", "c4"]
    words += ["--c4-min-sentences", "-1", "--no-c4-stop-mark", "--no-c4-curly-bracket"]
    assert main(words) == 0
    texts = [json.loads(line)["text"] for line in (tmp_path / "out/a.jsonl").read_text().splitlines()]
    assert texts == ["one two  three", "", "{ one two three", "four five six"]


def test_options_of_a_file_are_those_of_the_command_line(source, tmp_path):
    config = tmp_path / "clean.toml"
    config.write_text(
        '[other]\nx = 1\n[clean]\nsteps = ["c4", "length"]\nc4-min-sentences = -1\nno-c4-stop-mark = true\n'
        'c4_min_line_words = -1\nlength-min-words = 3\ncompression = "gzip"\n'
    )
    given = ["clean", "--input", str(source), "--workers", "1"]
    words = ["--steps", "c4", "length", "--c4-min-sentences", "-1", "--no-c4-stop-mark", "--c4-min-line-words", "-1"]
    assert main([*given, *words, "--length-min-words", "1", "--output", str(tmp_path / "given")]) == 0
    # What is given counts, before and after the file.
    for number, more in enumerate((["--length-min-words", "1"], ["--length-min-words=1"])):
        out = ["--compression", "none", "--output", str(tmp_path / str(number))]
        assert main([*given, *out, *more, "--config", str(config)]) == 0
        assert main([*given, "--config", str(config), *out, *more]) == 0  # finished: the same options
        assert (tmp_path / str(number) / "a.jsonl").read_bytes() == (tmp_path / "given/a.jsonl").read_bytes()
    assert main([*given, "--config", str(config), "--output", str(tmp_path / "all")]) == 0
    assert json.loads((tmp_path / "all/clean.report").read_text())["result"]["removed"] != {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "has no table [clean]"),
        ("[clean", "is not TOML"),
        ("[clean]\ngopher-min-wrds = 3", "gopher-min-wrds cannot be set there\n  try: gopher-min-words?"),
        ('[clean]\ninput = "x"', "input cannot be set there"),
        ('[clean]\nconfig = "x"', "config cannot be set there"),
        ('[clean]\ngopher-min-words = "x"', "argument --gopher-min-words: invalid float value: 'x'"),
        ("[clean]\ngopher-min-words = [1, 2]", "gopher-min-words = [1, 2]\n  expected: one value"),
        ('[clean]\nsteps = ["x"]', "argument --steps: invalid choice: 'x'"),
        ("[clean]\nno-c4-stop-mark = false", "no-c4-stop-mark = False\n  expected: true"),
        ("[clean.gopher]\nmin-words = 1", "gopher cannot be set there"),
    ],
)
def test_a_file_with_other_content_is_refused(text, message, source, tmp_path, capsys):
    config = tmp_path / "clean.toml"
    config.write_text(text)
    words = ["clean", "--input", str(source), "--output", str(tmp_path / "out"), "--config", str(config)]
    assert main(words) == 2
    assert message in capsys.readouterr().err
    config.unlink()
    assert main(words) == 2
    assert "clean.toml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "clean needs steps"),
        (["--steps", "length", "--compat", "openwebtext"], "clean needs steps"),
        (["--steps", "lengths"], "lengths"),
        (["--steps", "length", "--workers", "-1"], "workers is -1"),
        (["--compat", "openwebtext"], "OpenWebText counts GPT-2's tokens"),
        (["--steps", "fix", "--on-error", "skip", "--max-errors", "many"], "max_errors=many\n  expected: a number of"),
        (["--steps", "fix", "--max-errors", "5"], "max_errors has no effect with on_error=stop"),
        (["--steps", "length", "--quarantine", "x", "--on-error", "skip"], "--quarantine needs --on-error quarantine"),
        (["--steps", "gopher", "--gopher-min-words", "inf"], "--gopher-min-words is inf"),
    ],
)
def test_what_it_refuses(words, message, source, tmp_path, capsys):
    assert main(["clean", "--input", str(source), "--output", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
