"""The trainer's table of docs/howto/migrate.md, made from the table of arguments; a test holds the two together.

python scripts/migrate_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from trainer.migrate.flags import flag_table  # noqa: E402

PAGE = ROOT / "docs" / "howto" / "migrate.md"
BEGIN, END = "<!-- made by scripts/migrate_table.py -->\n", "<!-- end of what it makes -->\n"


def tables() -> str:
    """Three tables: what is mapped, what is not needed, what is refused."""
    flags = flag_table()
    lines = ["| mapped | here | how |", "|---|---|---|"]
    for flag in flags.values():
        if flag.use == "mapped" and not flag.same_as:
            names = [flag.name, *(other.name for other in flags.values() if other.same_as == flag.name)]
            lines.append(f"| {_names(names)} | `{flag.key}` | {flag.note} |")
    for use in ("not needed", "refused"):
        lines += ["", f"| {use} | why |", "|---|---|"]
        reasons = dict.fromkeys(flag.note for flag in flags.values() if flag.use == use)
        for reason in reasons:
            names = [flag.name for flag in flags.values() if flag.use == use and flag.note == reason]
            lines.append(f"| {_names(names)} | {reason} |")
    return "\n".join(lines) + "\n"


def with_tables(page: str) -> str:
    """The page with the tables as they are now."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + tables() + END + rest.partition(END)[2]


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
