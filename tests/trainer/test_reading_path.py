"""The files that docs/design/trainer.md recommends to newcomers are those of a first step, in order."""

from __future__ import annotations

import re

import pytest

from tests.helpers import rooms
from tests.helpers.executed_lines import executed_lines, main_files
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


@pytest.fixture(scope="module")
def declared() -> list[str]:
    text = (ROOT / "docs/design/trainer.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `((?:trainer|mdata)/\S+\.py)` \|", text.partition("## What to read:")[2], re.MULTILINE)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    folder = tmp_path_factory.mktemp("step")
    (folder / "run.toml").write_text(CONFIG)
    return executed_lines('assert main(["train", "run.toml"]) == 0', folder, before="from cli.mtrain import main\n")


def test_all_of_them_are_called_in_a_first_step(declared, lines):
    assert set(declared) <= lines.keys()


def test_files_of_many_lines_are_among_them(declared, lines):
    assert main_files(lines) <= set(declared)


def test_each_is_reached_from_one_that_was_read_before(declared):
    """It is imported there, or by one file between that is understood by name."""
    imports = rooms.all_imports("trainer")
    imports[FAMILIES["gpt"]] |= {"trainer.models.gpt.model"}  # built_by names it
    imports["trainer.models.family"] |= imports[FAMILIES["gpt"]]  # imported by name
    modules = [file.removesuffix(".py").replace("/", ".") for file in declared if file.startswith("trainer/")]
    for number, module in enumerate(modules[1:], 1):
        near = {other for before in modules[:number] for other in imports[before]}
        assert module in near.union(*(imports[other] for other in near)), module
