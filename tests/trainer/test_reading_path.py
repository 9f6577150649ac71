"""The files that docs/design/trainer.md recommends to newcomers are those of a first step, in order."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import rooms
from tests.helpers.house_rules import ROOT
from trainer.models.family import FAMILIES

CONFIG = """
[run]
folder = "run"
[model]
num_layers = 2
hidden_size = 16
num_heads = 2
vocab_size = 32
[data]
blend = "mock"
[train]
sequence_length = 8
global_batch = 2
micro_batch = 1
steps = 1
[optimizer]
lr = 1e-3
"""
TRACED = """
import json, sys, threading
from cli.mtrain import main
files = set()
def called(frame, event, _):
    if event == "call" and frame.f_code.co_name != "<module>":
        files.add(frame.f_code.co_filename)
threading.setprofile(called)
sys.setprofile(called)
assert main(["train", "run.toml"]) == 0
sys.setprofile(None)
print(json.dumps(sorted(files)))
"""


@pytest.fixture(scope="module")
def declared() -> list[str]:
    text = (ROOT / "docs/design/trainer.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(trainer/\S+\.py)` \|", text.partition("## What to read:")[2], re.MULTILINE)


def test_all_of_them_are_called_in_a_first_step(declared: list[str], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    command = [sys.executable, "-c", TRACED]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}
    )
    ran = {str(Path(file).relative_to(ROOT)) for file in json.loads(done.stdout.splitlines()[-1]) if str(ROOT) in file}
    assert set(declared) <= ran


def test_each_is_reached_from_one_that_was_read_before(declared: list[str]) -> None:
    """It is imported there, or by one file between that is understood by name."""
    imports = rooms.all_imports("trainer")
    imports[FAMILIES["gpt"]] |= {"trainer.models.gpt.model"}  # built_by names it
    imports["trainer.models.family"] |= imports[FAMILIES["gpt"]]  # imported by name
    modules = [file.removesuffix(".py").replace("/", ".") for file in declared]
    for number, module in enumerate(modules[1:], 1):
        near = {other for before in modules[:number] for other in imports[before]}
        assert module in near.union(*(imports[other] for other in near)), module
