"""Twin of mdata_cpp/packing.hpp: every row is looked at for every piece.

What best fit means is one line here: of the rows with the least room that takes the piece, the one whose room
changed last. Quadratic.
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


def pack(lengths: list[int], row_length: int, *, window: int) -> list[list[Piece]]:
    """Return the pieces of each row."""
    rows = []
    for first in range(0, len(lengths), window):
        rows += _pack_window(lengths[first : first + window], row_length, first=first)
    return rows


def _pack_window(lengths: list[int], row_length: int, *, first: int) -> list[list[Piece]]:
    full: list[list[Piece]] = []
    rest: list[Piece] = []
    for document, length in enumerate(lengths, first):
        starts = range(0, length - row_length + 1, row_length)
        full += [[(document, start, row_length)] for start in starts]
        if left := length % row_length:
            rest.append((document, length - left, left))
    rows: list[Row] = []
    for time, piece in enumerate(sorted(rest, key=lambda piece: -piece[2]), 1):
        fitting = [row for row in rows if row.room >= piece[2]]
        if not fitting:
            rows.append(Row(row_length))
            fitting = rows[-1:]
        best = min(fitting, key=lambda row: (row.room, -row.changed))
        best.room -= piece[2]
        best.changed = time
        best.pieces.append(piece)
    return full + [sorted(row.pieces) for row in rows]
