"""The files that docs/design/house.md recommends to newcomers are those that run, from the call to its result."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pytest

import mdata
from tests.helpers import rooms
from tests.helpers.corpora import write_pair
from tests.helpers.executed_lines import executed_lines, main_files
from tests.helpers.house_rules import ROOT


class Path(NamedTuple):
    """A section of the page, and what is called and how."""

    section: str
    name: str
    code: str


OPENING = """
dataset = mdata.open_dataset("x.json", sequence_length=16)
sample, rows = dataset[0], dataset.read([1, 2])
assert len(sample["tokens"]) == 16 and rows.text.shape == (2, 17)
"""
PREPROCESSING = """
options = mdata.PreprocessOptions(
    input=("x.jsonl",), output_prefix="out/x", tokenizer_type="ByteTokenizer", append_eod=True, workers=1
)
(manifest,) = mdata.preprocess(options).manifests.values()
assert manifest.provenance.records == 3
"""
PATHS = [
    Path("from `mdata.open_dataset` to tokens", "open_dataset", OPENING),
    Path("from a line of JSON to .bin", "preprocess", PREPROCESSING),
]


@pytest.fixture(scope="module", params=PATHS, ids=lambda path: path.name)
def path(request):
    return request.param


@pytest.fixture(scope="module")
def declared(path) -> tuple[list[str], set[str]]:
    """The files to read in their order, and the small ones that are understood by name."""
    text = (ROOT / "docs/design/house.md").read_text(encoding="utf-8")
    section = text.partition(f"## What to read: {path.section}\n")[2].partition("\n## ")[0]
    table, _, names = section.partition("understood by name:")
    files = re.findall(r"^\| `(mdata/\S+)` \|", table, re.MULTILINE)
    return files, {f"mdata/{name}.py" for name in re.findall(r"`(\S+)`", names)}


@pytest.fixture(scope="module")
def lines(path, tmp_path_factory) -> dict[str, int]:
    """Executed lines of the files of mdata; __init__ and C++ left out."""
    folder = tmp_path_factory.mktemp("reading")
    write_pair(folder / "x", [[10]] * 40, tokens=np.arange(400))
    mdata.adopt(folder / "x", None)
    (folder / "x.jsonl").write_text('{"text": "one"}\n' * 3)
    found = executed_lines(path.code, folder, before=f"import mdata\nmdata.{path.name}\n")
    return {file: number for file, number in found.items() if re.fullmatch(r"mdata/.*(?<!__init__)\.py", file)}


def test_the_lists_hold_what_is_called_and_nothing_else(declared, lines):
    files, by_name = declared
    assert set(files) | by_name == set(lines)
    assert not set(files) & by_name


def test_only_files_of_few_lines_are_understood_by_name(declared, lines):
    _, by_name = declared
    assert not main_files(lines) & by_name


def test_each_file_is_imported_by_one_that_was_read_before(declared):
    files, _ = declared
    imports = rooms.all_imports("mdata")
    modules = [file.removesuffix(".py").replace("/", ".") for file in files]
    for number, module in enumerate(modules[1:], 1):
        assert any(module in imports[before] for before in modules[:number]), module
