"""docs/reference/config.md is what scripts/config_page.py writes from the sections."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from trainer.config.describe import describe

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")


def test_the_page_is_written_by_the_script():
    made = subprocess.run(
        [sys.executable, "scripts/config_page.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert made.stdout == PAGE, "python scripts/config_page.py > docs/reference/config.md"


def test_every_setting_has_a_row():
    rows = {line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `")}
    assert rows == {key.name.partition(".")[2] for key in describe()}
