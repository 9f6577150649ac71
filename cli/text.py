"""Plain text output: aligned tables; and numbers as users type them.

Numbers are right-aligned, with commas as thousands separators; None is a dash.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdata.mixing.shares import fraction_of

if TYPE_CHECKING:
    from mdata.manifest.types import CorpusManifest


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell, numbers right-aligned with commas as thousands separators."""
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


def count(text: str) -> int:
    """A whole number above 0; 1e9 is accepted."""
    try:
        value = fraction_of(text.replace("_", ""))
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if value < 1 or value.denominator != 1 or value > 1 << 62:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not an integer from 1 to 2^62")
    return int(value)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    if not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text[:60]!r} is not an integer of at least 0")
    return int(text)


def add_tokenizer_unknown(parser: argparse.ArgumentParser) -> None:
    """The option for corpora without a recorded tokenizer beside others."""
    parser.add_argument(
        "--tokenizer-unknown",
        choices=["refuse", "ok"],
        default="refuse",
        help="whether to mix corpora that record their tokenizer with others that do not (default: refuse)",
    )


def add_allow_outside(parser: argparse._ActionsContainer, default: bool | None = False) -> None:
    """The option for manifests of corpora that name files outside their folder."""
    parser.add_argument(
        "--allow-outside",
        action="store_true",
        default=default,
        help="allow a corpus manifest to name files outside its folder; only for manifests that you trust",
    )


def add_training(parser: argparse.ArgumentParser, title: str) -> None:
    """The options for the length of training, and how it reads."""
    add = parser.add_argument_group(title).add_argument
    add("--tokens", type=count, metavar="N", help="its length in tokens (such as 1e9)")
    add("--samples", type=count, metavar="N", help="or in samples; needs --sequence-length")
    add("--sequence-length", "--seq-length", type=count, metavar="S", help="tokens per sample")
    add(
        "--split-shares",
        "--split",
        default="100,0,0",
        metavar="A,B,C",
        help="shares of training, validation and test (default: 100,0,0)",
    )


def written_corpora(made: Mapping[Path, CorpusManifest]) -> tuple[str, dict[str, Any]]:
    """The corpora that a command wrote, as a table and as facts: prefix -> manifest, one pair each."""
    rows = [
        {
            "manifest": f"{prefix}.json",
            "documents": manifest.shards[0].documents,
            "tokens": manifest.shards[0].tokens,
            "id": manifest.id,
        }
        for prefix, manifest in made.items()
    ]
    return table(("manifest", "documents", "tokens"), [tuple(row.values())[:-1] for row in rows]), {"corpora": rows}
