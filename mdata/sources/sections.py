"""The inputs of a job divided into parts: which files, and which sections of files, each part reads.

Every input is a sequence of units: the chunks of plain text, the row groups of parquet, the record batches of Arrow, or
the whole file if reading must begin at its start (compressed text, CSV, WARC, tar, one document per file). A unit
begins at a byte of the concatenated inputs, and part k of N takes the units that begin in the k-th of N equal ranges
of these bytes. So for any N the parts in order are the inputs in order, with nothing left out or repeated. Only the
footers of parquet and the message headers of Arrow are read, and only for the files at the two ends of a part.

Slow twin: tests/reference/sections.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mdata.sources.input_files import Section, SourceFile


@dataclass(frozen=True)
class PartNumber:
    """Part `number`, from 1, of `count`."""

    number: int
    count: int


def files_of_part(
    files: Sequence[SourceFile],
    part: PartNumber,
    *,
    chunk_bytes: int,
    text_is_whole: bool,
    rows_are_whole: bool = False,
) -> tuple[SourceFile, ...]:
    """The files and sections that one part of a job reads, in the order of the job.

    Args:
        files: all inputs of the job, which have sizes.
        part: which part.
        chunk_bytes: the size of the chunks of plain text.
        text_is_whole: a file of plain text is one document, which is not divided.
        rows_are_whole: parquet and Arrow are not divided either.

    Raises:
        BadInputError: the footer of a parquet file cannot be read.
    """
    total = sum(file.size_bytes for file in files)
    start = total * (part.number - 1) // part.count
    # An empty file may begin at the very end of all bytes.
    stop = total * part.number // part.count if part.number < part.count else total + 1
    files_read: list[SourceFile] = []
    begins = 0
    for file in files:
        ends = begins + file.size_bytes
        if start <= begins < stop and ends <= stop:
            files_read.append(file)
        elif begins < stop and (start < ends or begins == ends == start):
            packed = file.compression != "none" or file.format in ("csv", "tsv", "warc", "tar", "mediawiki", "html")
            undivided = packed or (file.format == "text" and text_is_whole)
            by_rows = not rows_are_whole
            chunk = 0 if undivided or (rows_are_whole and file.format in ("parquet", "arrow")) else chunk_bytes
            section = _section(file, start - begins, stop - begins, chunk_bytes=chunk, by_rows=by_rows)
            files_read += (
                [replace(file, section=section if section[:2] != (0, section.total) else None)] if section else []
            )
        begins = ends
    return tuple(files_read)


def _section(file: SourceFile, start: int, stop: int, *, chunk_bytes: int, by_rows: bool) -> Section | None:
    """The units of a file that begin in its bytes [start, stop), which may lie outside it; None: there are none."""
    if file.format == "parquet" and by_rows:
        from mdata.sources.parquet import group_starts

        starts = group_starts(file)
    elif file.format == "arrow" and by_rows:
        from mdata.sources.arrow_files import batch_starts

        starts = batch_starts(file)
    elif chunk_bytes:
        first, last = max(0, -(-start // chunk_bytes)), min(-(-stop // chunk_bytes), -(-file.size_bytes // chunk_bytes))
        begin, end = first * chunk_bytes, min(last * chunk_bytes, file.size_bytes)
        return Section(begin, end, file.size_bytes, end - begin) if first < last else None
    else:
        starts = [0]
    inside = [number for number, begins in enumerate(starts) if start <= begins < stop]
    if not inside:
        return None
    bounds = [*starts, file.size_bytes]
    return Section(inside[0], inside[-1] + 1, len(starts), disk_bytes=bounds[inside[-1] + 1] - bounds[inside[0]])
