"""The comparison with oracle/webtext: what is equal, that it can fail, and a folder of the form from the slow twins."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from tests.oracles.frame import answers
from tests.oracles.webtext import KINDS, compare, main
from tests.reference import dedup as twin
from tests.reference import text_rules

WORDS = [f"word{number}" for number in range(200)]


run = functools.partial(answers, compare)


LINES = {
    "kept": "kept: 3 of 3 cases equal",
    "filters": "filters: 6 of 6 cases equal",
    "ngrams": "ngrams: 4 of 4 cases equal",
    "urls": "urls: 2 of 2 cases equal",
}


@pytest.mark.parametrize("kind", LINES)
def test_a_folder_of_the_oracle_is_equal(oracles, kind):
    if kind == "urls":
        pytest.importorskip("tldextract")
    equal, lines, reasons = run(oracles / "oracle/webtext/main", kind)
    assert equal and not reasons and lines[0] == LINES[kind]


@pytest.mark.soak
def test_the_oracle_is_equal(oracles):
    equal, lines, reasons = run(oracles / "oracle/webtext")
    assert equal and not reasons and lines[-1] == "86 of 86 cases equal" and "cleanup: 14 of 14 cases equal" in lines


def test_what_cannot_be_compared_is_a_failure(tmp_path, capsys):
    assert run(tmp_path) == (False, ["0 of 0 cases equal"], []), "an empty folder"
    (tmp_path / "corpus.jsonl").write_text('{"url": "a", "text": "b"}\n')
    (tmp_path / "new.json").write_text("{}")
    (tmp_path / "minhash_md5_14x8.json").write_text('{"kept": []}')
    (tmp_path / "minhash_xxhash64_14x8.json").write_text("nothing")
    (tmp_path / "filters.jsonl").write_text('{"row": 0, "gopher": true, "fineweb": 1}\n')
    (tmp_path / "megatron.json").write_text('{"newer": 1, "groups_union_1_0.7": []}')
    equal, lines, reasons = run(tmp_path)
    assert not equal
    assert lines == [
        "kept: 0 of 2 cases equal",
        "groups: 0 of 1 cases equal",
        "filters: 0 of 2 cases equal",
        "new: 0 of 1 cases equal",
        "newer: 0 of 1 cases equal",
        "0 of 7 cases equal",
    ]
    assert all("cannot be read" in reason for reason in reasons[:3]) and "unknown kind" in reasons[-1]
    (tmp_path / "megatron.json").write_text("[")
    (tmp_path / "filters.jsonl").write_text("[")
    reasons = run(tmp_path)[2]
    assert "cannot be read" in reasons[2] and "cannot be read" in reasons[3]
    assert main([str(tmp_path), "--kind", "nothing"]) == 1 and "nothing" not in KINDS
    assert capsys.readouterr().out == "0 of 0 cases equal\n"
    assert main([str(tmp_path / "none")]) == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the oracle's form whose results the twins computed."""
    root = tmp_path_factory.mktemp("twin")
    texts = [" ".join(WORDS[first : first + 60]) for first in range(0, 140, 7)]
    texts += [texts[3].upper(), texts[4].replace("word40", "other"), "too short", "too short", ""]
    rows = [{"url": f"https://a.example/{number}", "text": text} for number, text in enumerate(texts)]
    (root / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = twin.first_of_groups(texts, bands=14, rows=8, ngram=5)
    # datatrove removes no text that is shorter than an n-gram.
    kept = [row["url"] for number, row in enumerate(rows) if groups[number] == number or len(texts[number]) < 20]
    assert 0 < len(kept) < len(rows) - 1
    (root / "minhash_xxhash64_14x8.json").write_text(json.dumps({"kept": kept}))
    verdicts = [{"row": number, **_verdicts(text)} for number, text in enumerate(texts)]
    (root / "filters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in verdicts))
    return root


def _verdicts(text: str) -> dict[str, str | bool]:
    """Some of the filters, by the twins' measures."""
    words = text_rules.words_of(text)
    stopped = text_rules.fineweb(text, words, 30)
    reason, kept = text_rules.c4(text, 5)
    return {
        "gopher_quality": "gopher_short_doc" if len(words) < 50 else "gopher_enough_stop_words",
        "fineweb": "empty" if not stopped[0] else "line_punct_ratio" if stopped[1] < 0.12 else True,
        "c4_paragraph": True if text_rules.third_longest(text) >= 200 else "< 3 paragraphs",
        "c4_quality": "too_few_sentences" if reason else True,
        "c4_quality_text": kept,
    }


def test_the_twin_is_equal(folder):
    lines = ["kept: 1 of 1 cases equal", "filters: 4 of 4 cases equal", "5 of 5 cases equal"]
    assert run(folder) == (True, lines, [])


def test_each_case_of_the_twin_can_fail(folder, tmp_path):
    (tmp_path / "corpus.jsonl").write_bytes((folder / "corpus.jsonl").read_bytes())
    results = json.loads((folder / "minhash_xxhash64_14x8.json").read_text())
    (tmp_path / "minhash_xxhash64_14x8.json").write_text(json.dumps({"kept": results["kept"][1:]}))
    rows = [json.loads(line) for line in (folder / "filters.jsonl").read_text().splitlines()]
    changed = [
        {name: "other" if name not in ("row", "c4_quality_text") else value for name, value in row.items()}
        for row in rows
    ]
    (tmp_path / "filters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    equal, lines, reasons = run(tmp_path)
    assert not equal and lines[:2] == ["kept: 0 of 1 cases equal", "filters: 0 of 4 cases equal"]
    assert "row 0: True instead of False" in reasons[0] and "instead of other" in reasons[1]
