"""docs/howto/training.md names every key of [train] and [optimizer], with its default."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from trainer.config.sections import OptimizerSection, TrainSection

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "training.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("section", [TrainSection, OptimizerSection])
def test_every_key_and_no_other_is_in_a_table(section):
    name = "train" if section is TrainSection else "optimizer"
    tables = re.findall(rf"\| key of `\[{name}\]` .*?(?=\n\n)", PAGE, flags=re.DOTALL)
    cells = [line.split(" | ")[0] for table in tables for line in table.splitlines()[2:]]
    found = [key for cell in cells for key in re.findall(r"`(\w+)`", cell)]
    assert sorted(found) == sorted(field.name for field in dataclasses.fields(section))


def test_defaults_are_those_of_the_sections():
    for section in (TrainSection, OptimizerSection):
        for field in dataclasses.fields(section):
            row = re.search(rf"\n\| `{field.name}` \| (.*?) \|", PAGE)
            if row is None or field.default is dataclasses.MISSING:
                continue
            told = row[1].strip('"')
            assert told == (f"{field.default:g}" if isinstance(field.default, float) else str(field.default)), field
