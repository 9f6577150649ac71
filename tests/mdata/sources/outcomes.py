"""The outcome for a file, in the words of the tables in malformed.md."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from mdata.errors import MdataError
from tests.mdata.sources.inputs import find_files, texts


def outcome(path: Path) -> tuple[int, str]:
    """Good documents, and the bad rows by kind or the refusal."""
    documents = 0
    bad_rows: list[tuple[int, str]] = []
    rows = 0
    try:
        for file in find_files([path]):
            found, bad, count = texts(file, 1 << 16)
            documents += len(found)
            bad_rows += [(rows + row, kind) for row, kind in bad]
            rows += count
    except MdataError as error:
        said = str(error).splitlines()[0].removeprefix(str(path)).removeprefix(": ").removeprefix(" is ")
        return 0, "refused: " + said.split(" after ")[0]
    return documents, "; ".join(_runs(bad_rows)) or "none"


def _runs(bad_rows: list[tuple[int, str]]) -> list[str]:
    """Rows that follow each other with one kind of fault, together."""
    told = []
    numbered = [(row - place, kind, row) for place, (row, kind) in enumerate(bad_rows)]
    for (_, kind), run in groupby(numbered, key=lambda entry: entry[:2]):
        rows = [row for *_, row in run]
        told.append(f"row {rows[0]}: {kind}" if len(rows) == 1 else f"rows {rows[0]}-{rows[-1]}: {kind}")
    return told
