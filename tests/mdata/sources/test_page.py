"""Every hostile file has the outcome of malformed.md, and docs/reference/input.md names all kinds and endings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from mdata.sources import input_files, record_batch
from tests.conftest import ROOT
from tests.mdata.sources.outcomes import outcome

PAGE = Path(ROOT / "docs" / "reference" / "input.md").read_text()
ROW = re.compile(r"^\| (\S+\.\S+) \| [^|]+ \| ([\d,]+) \| ([^|]+) \|$", re.MULTILINE)
TABLE = Path(__file__).with_name("malformed.md").read_text()
STATED = {name: (int(documents.replace(",", "")), bad) for name, documents, bad in ROW.findall(TABLE)}


def hostile(folder):
    return [*(folder / "jsonl").iterdir(), *(folder / "compressed").iterdir(), folder / "directory_as_file.jsonl"]


def test_every_hostile_file_has_the_stated_outcome(oracles):
    paths = hostile(oracles / "hostile")
    assert {path.name: outcome(path) for path in paths} == STATED
    assert len(STATED) == len(paths) == 67


@pytest.mark.parametrize("kind", get_args(record_batch.Kind))
def test_the_page_names_every_kind_of_problem(kind):
    assert re.search(rf"^\| {kind} \|", PAGE, re.MULTILINE)


def test_the_page_names_every_ending():
    for endings in input_files.ENDINGS.values():
        assert all(f"`.{part}`" in PAGE for ending in endings for part in ending.split(".")[1:])
