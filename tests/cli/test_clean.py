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


def test_it_says_what_became_of_the_rows(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["clean", "--input", str(source), "--output", str(tmp_path / "out"), "--steps", "length", "collapse"]
    assert main([*words, "--length-min-words", "3", "--removed", str(tmp_path / "removed.jsonl")]) == 0
    printed = capsys.readouterr().out
    assert "3 of 4 rows stay, 1 of them changed; removed: 1 (25.00 %)\n  1  length-min-words\n" in printed
    assert [json.loads(line)["text"] for line in (tmp_path / "out/a.jsonl").read_text().splitlines()] == [
        "one two three",
        "{ one two three",
        "four five six",
    ]
    assert json.loads((tmp_path / "removed.jsonl").read_text())["row"] == 2


def test_rows_only_says_what_comes_next(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["clean", "--input", str(source), "--output", str(out), "--steps", "length", "--rows-only"]
    assert main([*words, "--length-min-words", "3"]) == 0
    assert f"next: mdata preprocess --skip-rows {out}" in capsys.readouterr().out


def test_rules_of_c4_can_be_left_out(source: Path, tmp_path: Path) -> None:
    words = ["clean", "--input", str(source), "--output", str(tmp_path / "out"), "--steps", "c4"]
    words += ["--c4-min-sentences", "-1", "--no-c4-stop-mark", "--no-c4-curly-bracket"]
    assert main(words) == 0
    texts = [json.loads(line)["text"] for line in (tmp_path / "out/a.jsonl").read_text().splitlines()]
    assert texts == ["one two  three", "", "{ one two three", "four five six"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "clean needs steps"),
        (["--steps", "length", "--compat", "openwebtext"], "clean needs steps"),
        (["--steps", "lengths"], "lengths"),
        (["--steps", "length", "--workers", "-1"], "workers is -1"),
        (["--compat", "openwebtext"], "OpenWebText counts GPT-2's tokens"),
        (["--steps", "length", "--quarantine", "x"], "on_error=stop with quarantine=x"),
        (["--steps", "gopher", "--gopher-min-words", "inf"], "--gopher-min-words is inf"),
    ],
)
def test_what_it_refuses(
    words: list[str], message: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clean", "--input", str(source), "--output", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
