"""Plain text for people: aligned tables, nothing else.

Numbers stand to the right, with thousands parted by commas; None is a dash.
"""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell, numbers to the right with thousands parted by commas."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    right = [all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]
    lines = []
    for line in [list(header), *cells]:
        parts = zip(line, widths, right, strict=True)
        lines.append("  ".join(t.rjust(w) if is_right else t.ljust(w) for t, w, is_right in parts).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)
