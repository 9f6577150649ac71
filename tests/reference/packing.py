"""Twin of mdata_cpp/packing.hpp: every row is examined for every piece.

Best fit is one line here: of the rows with the least room that fits the piece, the one whose room changed last.
Quadratic.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Piece = tuple[int, int, int]  # document, its first token there, tokens


@dataclass
class Row:
    """A row that is being filled."""

    room: int
    changed: int = 0
    pieces: list[Piece] = field(default_factory=list)


def pack(lengths: list[int], row_length: int, *, window: int, overlap: int = 0, least: int = 1) -> list[list[Piece]]:
    """Return the pieces of each row."""
    rows = []
    for first in range(0, len(lengths), window):
        full: list[list[Piece]] = []
        rest: list[Piece] = []
        for document, length in enumerate(lengths[first : first + window], first):
            starts = range(0, length - row_length + 1, row_length - overlap)
            full += [[(document, start, row_length)] for start in starts]
            begin = len(starts) * (row_length - overlap)
            left = length - begin
            if left >= least and (not starts or left > overlap):
                rest.append((document, begin, left))
        rows += full + _fit(rest, row_length)
    return rows


def _fit(pieces: list[Piece], row_length: int) -> list[list[Piece]]:
    rows: list[Row] = []
    for time, piece in enumerate(sorted(pieces, key=lambda piece: -piece[2]), 1):
        fitting = [row for row in rows if row.room >= piece[2]]
        if not fitting:
            rows.append(Row(row_length))
            fitting = rows[-1:]
        best = min(fitting, key=lambda row: (row.room, -row.changed))
        best.room -= piece[2]
        best.changed = time
        best.pieces.append(piece)
    return [sorted(row.pieces) for row in rows]
