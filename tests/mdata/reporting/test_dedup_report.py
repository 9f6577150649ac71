"""The page of what `mdata dedup` removed: numbers, examples side by side, and texts that are not there any more."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cli.mdata import main
from mdata import DamageError
from mdata.dedup.dedup import dedup
from mdata.dedup.plan import DedupOptions
from mdata.reporting.dedup_report import is_dedup_folder, marked, report_dedup

LONG = " ".join(f"w{number}" for number in range(400))
TEXTS = ["<b>one</b> two three four\nfive", "<i>one</i> two three four\nfive", "other", "x", "X!", LONG, f"{LONG} end"]


def _made(folder: Path, name: str = "a.jsonl") -> Path:
    data = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    dedup(DedupOptions(input=folder / name, output=folder / "out", bands=20, rows=2, ngram=2))
    return folder / "out"


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_numbers_and_examples(name, tmp_path, capsys):
    folder = _made(tmp_path, name)
    assert is_dedup_folder(folder) and not is_dedup_folder(tmp_path)
    assert main(["report", str(folder), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rows"], facts["removed"], facts["clusters"], facts["examples"]) == (7, 3, 3, 3)
    assert facts["groups_by_size"] == {"2": 3} and facts["exact"] == 1
    page = Path(facts["page"]).read_text()
    ElementTree.fromstring(page.replace("<!doctype html>", ""))
    assert "3 of 7 rows (42.86 %) repeat earlier ones, 1 of them exactly; 3 groups; 20 bands of 2" in page
    assert page.count('class="pair"') == 3 and f"kept: {tmp_path / name}:1<" in page
    assert "<mark>&lt;b&gt;one&lt;/b&gt;</mark> two three four\nfive" in page
    assert "<mark>&lt;i&gt;one&lt;/i&gt;</mark> two three four\nfive" in page
    assert "33.33 % of their n-grams in common" in page.replace("\n", " ")
    (end,) = re.findall(r"<p>(\.\.\. [^<]* <mark>end</mark>)", page)
    assert len(end.split()) < 60


def test_texts_that_are_not_there_any_more_are_left_out(tmp_path):
    folder = _made(tmp_path)
    (tmp_path / "a.jsonl").unlink()
    made = report_dedup(folder, tmp_path / "page.html")
    assert made.facts["examples"] == 0 and "no text could be read again" in (tmp_path / "page.html").read_text()
    (folder / "clusters.jsonl").write_text("{}\n")
    with pytest.raises(DamageError, match=r"clusters\.jsonl:1 is not a group"):
        report_dedup(folder)


def test_words_are_marked_where_texts_differ():
    assert marked("a b  c", "a x c d") == ("a <mark>b</mark> c", "a <mark>x</mark> c <mark>d</mark>")
    assert marked("a b", "a b") == ("a b", "a b")
    assert marked("", "a") == ("", "<mark>a</mark>")
