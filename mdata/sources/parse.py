"""One door to all parsers: the bytes of a piece in, columns of text and problems out; and readers of whole
files for those who want one record after another in one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from mdata.sources.chunk import pieces, read_piece
from mdata.sources.input_files import Format, SourceFile, check_unchanged
from mdata.sources.jsonl import parse_lines
from mdata.sources.plain_text import parse_text
from mdata.sources.record_batch import ReadSpec, RecordBatch

# What a single reader takes at once: large enough for the disk, small beside any machine's memory.
_READ_BYTES = 1 << 22


@dataclass(frozen=True)
class Record:
    """One record: its row (from 1) in its file and, for each key, its sentences (a plain string is one)."""

    row: int
    texts: tuple[list[str], ...]


def parse(piece_format: Format, data: bytes, *, spec: ReadSpec) -> RecordBatch:
    """The records of a piece, and every row that cannot be taken."""
    if piece_format == "jsonl":
        return parse_lines(data, spec)
    if piece_format == "text":
        return parse_text(data, spec)
    from mdata.sources.parquet import parse_rows

    return parse_rows(data, spec)


def read_records(file: SourceFile, keys: Sequence[str], *, spec: ReadSpec | None = None) -> Iterator[Record]:
    """All records of one file, one after another.

    Args:
        file: of any format.
        keys: whose values are taken.
        spec: how, its own keys left aside.

    Raises:
        BadInputError: a record that cannot be taken, with its file and row.
        UsageError: the file cannot be read, or was changed meanwhile.
    """
    how = replace(spec or ReadSpec(), json_keys=tuple(keys))
    rows = 0
    with closing(pieces([file], _READ_BYTES, spec=how)) as parts:
        for piece in parts:
            batch = parse(file.format, read_piece(piece, how), spec=how)
            stop = batch.problems[0].row if batch.problems else None
            yield from _records(batch, rows, before=stop)
            if batch.problems:
                raise batch.problems[0].as_error(file.path, rows)
            rows += batch.rows
    check_unchanged(file)


def read_texts(files: Sequence[SourceFile], spec: ReadSpec) -> Iterator[str]:
    """Every sentence of every key of all files, one after another; raises as `read_records` does."""
    for file in files:
        for record in read_records(file, spec.json_keys, spec=spec):
            for sentences in record.texts:
                yield from sentences


def _records(batch: RecordBatch, rows_before: int, *, before: int | None) -> Iterator[Record]:
    rows = range(1, batch.rows + 1) if batch.kept is None else batch.kept
    starts = [0] * len(batch.columns)
    for number, row in enumerate(rows):
        if before is not None and row >= before:
            return
        ends = [number + 1 if column.ends is None else column.ends[number] for column in batch.columns]
        spans = zip(batch.columns, starts, ends, strict=True)
        yield Record(rows_before + row, tuple(column.sentences[a:b] for column, a, b in spans))
        starts = ends
