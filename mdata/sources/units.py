"""The names that `mdata.preprocess` used before pieces (Unit, Block and their functions), on top of the new ones.

To be removed with their last caller. A unit is a range of a plain file or the whole of a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mdata.sources.batch import Problem, ReadSpec
from mdata.sources.files import SourceFile
from mdata.sources.piece import Piece, pieces, read_piece
from mdata.sources.readers import Record, _records, parse


@dataclass(frozen=True)
class Unit:
    """The lines of a plain file that begin in [start, stop), or the whole of a compressed one."""

    file: SourceFile
    start: int
    stop: int


@dataclass(frozen=True)
class Block:
    """Whole lines, and how many bytes of the file they came from (for progress only)."""

    data: bytes
    file_bytes: int


class RowError(Exception):
    """Raised by `parse_block`; carries a `Problem`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


def plan_units(files: Sequence[SourceFile], unit_bytes: int) -> list[Unit]:
    """Units of at most `unit_bytes` that cover every file once, in order."""
    units = []
    for file in files:
        step = max(file.size_bytes, 1) if file.streamed else unit_bytes
        starts = range(0, file.size_bytes, step)
        units += [Unit(file, start, min(start + step, file.size_bytes)) for start in starts]
    return units


def blocks(unit: Unit, unit_bytes: int) -> Iterator[Block]:
    """The text of a unit as blocks of whole lines: one for a plain range, many for a compressed file."""
    if not unit.file.streamed:
        yield Block(read_range(unit), unit.stop - unit.start)
        return
    for piece in pieces([unit.file], unit_bytes, spec=ReadSpec()):
        yield Block(piece.data or b"", piece.file_bytes)


def read_range(unit: Unit) -> bytes:
    """The lines of a plain file that begin in the unit's range."""
    return read_piece(Piece(0, 0, unit.file, unit.start, unit.stop, None, 0), ReadSpec())


def parse_block(data: bytes, keys: Sequence[str]) -> Iterator[Record]:
    """The records of a block of whole lines; raises RowError at the first line that cannot be taken."""
    batch = parse("jsonl", data, spec=ReadSpec(json_keys=tuple(keys)))
    yield from _records(batch, 0, before=batch.problems[0].row if batch.problems else None)
    if batch.problems:
        raise RowError(batch.problems[0])
