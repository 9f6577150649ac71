"""The tables of docs/howto/migrate.md are those of the command."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_shows_the_table() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "migrate_table.py"))
    page = (ROOT / "docs" / "howto" / "migrate.md").read_text(encoding="utf-8")
    assert script["with_tables"](page) == page, "run scripts/migrate_table.py"
    assert script["BEGIN"] in page and "| `--num-layers`, `--encoder-num-layers` | `model.num_layers` |  |" in page
