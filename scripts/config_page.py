"""The table of all settings in docs/reference/config.md, written from the sections of trainer/config.

    python scripts/config_page.py > docs/reference/config.md

tests/trainer/config/test_config_page.py holds the page to it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.config.describe import Key, describe, section_texts

HEAD = """# All settings of a run

Every key of the TOML file that `mtrain train` reads. `mtrain config` prints the same as a file with all keys and their
defaults, `mtrain config --key KEY` explains one key. [training.md](../howto/training.md) says what they do together.
"""


def page() -> str:
    """The page as Markdown, one table a section."""
    lines, keys = [HEAD], describe()
    for section, text in section_texts().items():
        lines += [f"## `[{section}]`", "", text, "", "| key | default | values | what it is |", "|---|---|---|---|"]
        lines += [_row(key) for key in keys if key.name.startswith(f"{section}.")]
        lines.append("")
    return "\n".join(lines)


def _row(key: Key) -> str:
    name = key.name.partition(".")[2]
    comment = key.comment[:1].upper() + key.comment[1:]
    cells = [f"`{name}`", _default(key.default), key.expected, comment]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(value: object) -> str:
    if value is None:
        return "has to be set"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{value:g}`" if isinstance(value, float) else f"`{list(value) if isinstance(value, tuple) else value}`"


if __name__ == "__main__":
    sys.stdout.write(page())
