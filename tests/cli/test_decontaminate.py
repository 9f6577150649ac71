"""`mdata decontaminate`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.mdata import main

ITEM = "one two three four five six seven eight"


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    texts = [f"First. {ITEM.upper()}. Last.", "nothing here"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"question": ITEM, "answer": "nine"}) + "\n")
    against = f"tasks={tmp_path / 'eval.jsonl'}"
    return ["decontaminate", "--input", str(tmp_path / "a.jsonl"), "--against", against, "--against-keys", "question"]


def test_it_says_what_was_found(words, tmp_path, capsys):
    assert main([*words, "--output", str(tmp_path / "report"), "--mode", "report"]) == 0
    assert capsys.readouterr().out == "tasks: 1 of 1 item (100.00 %) in 1 row\n"
    assert main([*words, "--output", str(tmp_path / "drop")]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 rows kept" in printed and "  1  contaminated-tasks\n" in printed
    split = ["--mode", "split", "--margin", "1", "--min-characters", "3"]
    assert main([*words, "--output", str(tmp_path / "split"), *split]) == 0
    texts = [json.loads(line)["text"] for line in (tmp_path / "split/a.jsonl").read_text().splitlines()]
    assert texts == ["First.", "nothing here"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--ngram", "5"], "min_ngram=8, ngram=5"),
        (["--compat", "openwebtext"], "OpenWebText splits texts"),
        (["--mode", "split", "--rows-only"], "rows_only lists removed rows"),
        (["--against-keys", "other"], "no key 'other'"),
    ],
)
def test_what_it_refuses(more, message, words, tmp_path, capsys):
    command = [*(words[:-2] if "--against-keys" in more else words), "--output", str(tmp_path / "out")]
    assert main([*command, *more]) in (2, 3)
    assert message in capsys.readouterr().err
