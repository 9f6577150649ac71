"""The files that docs/design/house.md tells a newcomer to read are those that run from `mdata.open` to tokens."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import numpy as np
import pytest

import mdata
from tests.helpers import rooms
from tests.helpers.corpora import write_pair
from tests.helpers.house_rules import ROOT

MOST_FILES, MOST_LINES, MOST_MODULES = 14, 3_150, 41

RUN = """
import json, sys
import mdata
mdata.open
files = set()
def called(frame, event, _):
    if event == "call" and frame.f_code.co_name != "<module>":
        files.add(frame.f_code.co_filename)
sys.setprofile(called)
dataset = mdata.open(sys.argv[1], sequence_length=16)
sample, rows = dataset[0], dataset.read([1, 2])
sys.setprofile(None)
assert len(sample["tokens"]) == 16 and rows.text.shape == (2, 17)
modules = [m.__file__ for name, m in sys.modules.items() if name.startswith("mdata.")]
print(json.dumps([sorted(files), modules]))
"""


@pytest.fixture(scope="module")
def declared() -> tuple[list[str], set[str]]:
    """The files to read in their order, and those that are understood by name."""
    text = (ROOT / "docs/design/house.md").read_text(encoding="utf-8")
    section = text.partition("## What to read")[2].partition("\n## ")[0]
    table, _, names = section.partition("understood by name:")
    return re.findall(r"^\| `(mdata/\S+)` \|", table, re.MULTILINE), {
        f"mdata/{name}.py" for name in re.findall(r"`(\S+)`", names)
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[set[str], set[str]]:
    """The files of mdata whose functions are called, and all that are imported; __init__ and C++ left out."""
    folder = tmp_path_factory.mktemp("reading")
    write_pair(folder / "x", [[10]] * 40, tokens=np.arange(400))
    mdata.adopt(folder / "x", None)
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder / "x.json")], capture_output=True, text=True, check=True, cwd=ROOT
    )
    ours = str(ROOT / "mdata") + "/"
    return tuple(
        {
            f"mdata/{file.removeprefix(ours)}"
            for file in files
            if file.startswith(ours) and file.endswith(".py") and not file.endswith("__init__.py")
        }
        for files in json.loads(done.stdout)
    )


def test_the_lists_hold_what_is_called_and_nothing_else(declared, ran):
    path, by_name = declared
    assert set(path) | by_name == ran[0]
    assert not set(path) & by_name


def test_each_file_is_imported_by_one_that_was_read_before(declared):
    path, _ = declared
    imports = rooms.all_imports("mdata")
    modules = [file.removesuffix(".py").replace("/", ".") for file in path]
    for number, module in enumerate(modules[1:], 1):
        assert any(module in imports[before] for before in modules[:number]), module


def test_the_path_is_short(declared, ran):
    path, _ = declared
    lines = sum((ROOT / file).read_text(encoding="utf-8").count("\n") for file in path)
    assert len(path) <= MOST_FILES
    assert lines <= MOST_LINES, f"{lines} lines"
    assert len(ran[1]) <= MOST_MODULES, f"{len(ran[1])} modules are imported"
