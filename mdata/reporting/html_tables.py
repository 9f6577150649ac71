"""Tables of a report's page: numbers right-aligned with thousands separators, a dash for unknown values.

Each table is in a box that scrolls both ways, so that a long or wide table does not move the page; its header and its
first column stay visible.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mdata.reporting.svg import escape

_LONG = 18  # rows shown without scrolling


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Args:
        value: None becomes a dash; numbers are formatted for reading.
        kind: a class of the style sheet; "raw": the value is HTML already.
        hint: shown when the pointer rests on the cell.
    """

    value: str | int | float | None
    kind: str = ""
    hint: str = ""


def table(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table whose first column names its rows; the header of a text column is left-aligned."""
    lines = list(rows)
    texts = [any(_is_text(line[i]) for line in lines) for i in range(len(header))]
    kinds = [' class="text"' if is_text else "" for is_text in texts]
    names = [escape(name).replace("_", "_<wbr>") for name in header]  # a long name need not widen its column
    head = "".join(f'<th scope="col"{kind}>{name}</th>' for name, kind in zip(names, kinds, strict=True))
    body = "".join(f"<tr>{_row(line)}</tr>" for line in lines)
    box = "scroll long" if len(lines) > _LONG else "scroll"
    return f'<div class="{box}" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def percent(value: float) -> str:
    """0.1234 as 12.34 %; a value above zero is never shown as zero."""
    text = f"{100 * value:.2f}"
    return "< 0.01 %" if text == "0.00" and value > 0 else f"{text} %"


def _row(cells: Sequence[Cell]) -> str:
    first, *others = cells
    hint = f' title="{escape(first.hint)}"' if first.hint else ""
    kind = f' class="{first.kind}"' if first.kind not in ("", "raw") else ""
    return f'<th scope="row"{kind}{hint}>{_content(first)}</th>' + "".join(map(_td, others))


def _td(cell: Cell) -> str:
    kind = cell.kind or ("" if _is_text(cell) else "number")
    return f'<td class="{kind}">{_content(cell)}</td>' if kind else f"<td>{_content(cell)}</td>"


def _is_text(cell: Cell) -> bool:
    """Whether the column is left-aligned."""
    text = isinstance(cell.value, str) and cell.value != "" and not cell.value.endswith("%")
    return cell.kind == "raw" or (text and cell.kind not in ("number", "good", "bad"))


def _content(cell: Cell) -> str:
    value = cell.value
    if value is None:
        return "-"
    if isinstance(value, str):
        return value if cell.kind == "raw" else escape(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
