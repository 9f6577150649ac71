"""`mdata report`: a page beside the manifest, its numbers with --json."""

from __future__ import annotations

import json

import pytest

import mdata
from cli.mdata import main
from tests.helpers.corpora import write_pair


@pytest.fixture
def mix(tmp_path, monkeypatch):
    for name, count in (("a", 100), ("b", 50)):
        write_pair(tmp_path / f"{name}_text_document", [[10]] * count)
    monkeypatch.chdir(tmp_path)
    mdata.make_blend(["0.5", "a_text_document", "0.5", "b_text_document"], "mix.json")
    return tmp_path


def run(capsys, *words: str, code: int = 0) -> str:
    assert main(["report", *words]) == code
    out, err = capsys.readouterr()
    return out if code == 0 else err


def test_the_page_is_written_beside(mix, capsys):
    assert run(capsys, "mix.json") == "mix.report.html: report of mix\n"
    assert (mix / "mix.report.html").read_text().startswith("<!doctype html>")
    run(capsys, "mix.json", "-o", "other.htm")
    assert (mix / "other.htm").exists()


def test_json_has_the_numbers(mix, capsys):
    facts = json.loads(run(capsys, "mix.json", "--json", "--tokens", "2e3", "--full"))
    assert facts["page"] == "mix.report.html"
    assert [part["read_tokens"] for part in facts["components"]] == [1000, 1000]
    assert facts["runs_out_first"] == "b"
    assert facts["vocabulary"]["distinct"] == 1000, "two corpora of the ids from 0"
    assert facts["curves"]["bands"][1] | {"epochs": None} == {
        "name": "b", "group": None, "components": [1], "shares": [0.5], "epochs": None}  # fmt: skip


def test_mistakes_are_one_message(mix, capsys):
    assert "--samples needs --sequence-length" in run(capsys, "mix.json", "--samples", "3", code=2)
    assert "neither a manifest nor" in run(capsys, "nothing", code=2)
    (mix / "run").mkdir()
    (mix / "run" / "config.toml").touch()
    assert "try: mtrain report run" in run(capsys, "run", code=2)
    assert "does not end in .html" in run(capsys, "mix.json", "-o", "mix", code=2)
