"""`mdata extract`: what it prints, and its options."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("resiliparse")
pytest.importorskip("mwparserfromhell")

from cli.mdata import main
from tests.helpers.pages import DUMP_END, DUMP_HEAD, answer, html, warc_record, wiki_page


def test_it_says_what_became_of_the_pages(tmp_path, capsys):
    found = [warc_record(answer(html())), warc_record(answer(b"", status="404 No")), warc_record(b"x", kind="request")]
    (tmp_path / "a.warc").write_bytes(b"".join(found) + b"WARC/")
    words = ["extract", "--input", str(tmp_path), "--output", str(tmp_path / "out"), "--workers", "1"]
    assert main(words) == 3
    assert "a.warc:4: the WARC data is damaged at record 4" in capsys.readouterr().err
    assert main([*words, "--on-error", "skip"]) == 0
    printed = capsys.readouterr().out
    assert (
        printed == "pages with text: 1; removed: 1; records that are not pages: 1 of 4\n  1  status-4xx\nbad rows: 1\n"
    )
    assert main([*words, "--on-error", "skip", "--whole-page"]) == 2
    assert "holds the result of other input or options" in capsys.readouterr().err


def test_namespaces_and_the_key_of_the_text(tmp_path, capsys):
    pages = wiki_page("A", "article") + wiki_page("Talk:A", "talk", namespace=1)
    (tmp_path / "w.xml").write_bytes(DUMP_HEAD + pages + DUMP_END)
    words = ["extract", "--input", str(tmp_path / "w.xml"), "--output", str(tmp_path / "out"), "--namespaces", "1"]
    assert main([*words, "--json", "--json-key", "body", "--workers", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == {"namespace-0": 1}
    (line,) = (tmp_path / "out/w.jsonl").read_text().splitlines()
    assert json.loads(line)["body"] == "talk"
