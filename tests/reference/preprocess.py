"""Twin of partitions.py, of `held_out` and of origins.py: one row at a time, Python lists.

Where each document goes and where it came from, as simply as possible.
"""

from __future__ import annotations

from fractions import Fraction

from blake3 import blake3

HELD_OUT = "holdout"


def part_of(row: int, num_rows: int, *, partitions: int, sequential: bool) -> int:
    """Return the part of a row (from 0, over all files): every P-th row, or equal runs of rows."""
    if not sequential:
        return row % partitions
    run = (num_rows + partitions - 1) // partitions
    return next(part for part in range(partitions) if part * run <= row < (part + 1) * run)


def is_held_out(sentences: list[str], share: str) -> bool:
    """Return whether the first 8 bytes of the text's hash, as a fraction of their range, lie below the share."""
    text = b"".join(sentence.encode() + b"\xff" for sentence in sentences)
    return Fraction(int.from_bytes(blake3(text).digest()[:8], "little"), 2**64) < Fraction(share)


def routes_of(
    documents: list[tuple[int, list[str]]], num_rows: int, *, partitions: int, sequential: bool, share: str
) -> list[int | str]:
    """Return the part of each (row, its sentences), or "holdout"."""
    return [
        HELD_OUT
        if is_held_out(sentences, share)
        else part_of(row, num_rows, partitions=partitions, sequential=sequential)
        for row, sentences in documents
    ]


def runs_of(places: list[tuple[int, int]], step: int) -> list[tuple[int, int, int]]:
    """Return (document, file, row) wherever a document's (file, row) is not `step` rows after the previous one."""
    runs = []
    expected = None
    for document, (file, row) in enumerate(places):
        if (file, row) != expected:
            runs.append((document, file, row))
        expected = (file, row + step)
    return runs


def places_of(runs: list[tuple[int, int, int]], step: int, *, documents: int) -> list[tuple[int, int]]:
    """Return (file, row) of each document: the inverse of `runs_of`."""
    places: list[tuple[int, int]] = []
    for first, file, row in runs:
        after = min([document for document, _, _ in runs if document > first], default=documents)
        places += [(file, row + k * step) for k in range(after - first)]
    return places
