"""`dedup --substring N`: text that repeats N bytes or more of earlier text of the same part is cut out of documents.

The texts of a part, at most 2 GB, are in memory with their lines and a suffix array of 4 bytes for each byte of text
(Lee et al., 2022). The first copy stays, in the order of the input. Cuts keep UTF-8 whole, so a character at the end of
a repeat may stay. A row keeps its other keys; it is left out only if no text remains, or if it is bad. Chinese or
Japanese texts have three bytes a character: give a larger N.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import zstandard

from mdata import _core
from mdata.dedup.plan import DedupJob, text_path
from mdata.dedup.signing import in_threads
from mdata.errors import UsageError, counted
from mdata.progress import Progress
from mdata.sources.chunk import Chunk, read_chunk
from mdata.sources.input_files import check_unchanged
from mdata.sources.json_rows import dump_row, load_row
from mdata.sources.jsonl import split_lines
from mdata.sources.parse import parse
from mdata.sources.sections import PartNumber
from mdata.util import atomic_io

MOST_BYTES = 2_000_000_000
_LEVEL = 3
_ROWS_AT_ONCE = 4096


def cut_substrings(job: DedupJob, task: PartNumber, progress: Progress) -> None:
    """Write the texts of a part without repeats, unless its file exists.

    Raises:
        UsageError: too much text, an input that changed, or keys that cannot be replaced.
    """
    path = text_path(job.folder, task)
    if path.exists():
        return
    sources = [file for _, file in job.files_of(task)]
    text, ends, lines = bytearray(), [0], list[bytes | None]()
    progress.begin("reading", sum(file.disk_bytes for file in sources), unit="B")
    for chunk, (texts, of_chunk) in in_threads(job, sources, (0, 0), lambda chunk: _read(job, chunk)):
        for data in texts:
            text += data
            ends.append(len(text))
        lines += of_chunk
        if len(text) > MOST_BYTES:
            more = "--shard 1/4, or mdata launch with more --parts: a part is compared with itself alone"
            raise UsageError(
                f"part {task.number} of {task.count} has too much text for --substring",
                found=f"more than {MOST_BYTES:,} bytes",
                expected="at most that",
                fix=more,
            )
        progress.advance(chunk.file_bytes)
    progress.end()
    for file in sources:
        check_unchanged(file)
    content = bytes(text)
    del text
    progress.begin("finding repeats", None, unit="B")
    ranges = _core.repeated_ranges(content, np.array(ends[1:], np.int64), job.options.substring)
    progress.end()
    with atomic_io.atomic_file(path) as fd:
        rows = list[bytes]()
        for line in _rows(job, content, ends, lines, ranges):
            rows.append(line)
            if len(rows) == _ROWS_AT_ONCE:
                _write(fd, rows)
        if rows:
            _write(fd, rows)
    removed = int((ranges[:, 1] - ranges[:, 0]).sum())
    progress.note(
        f"{removed:,} of {len(content):,} bytes of text repeat earlier ones, in {counted(len(ranges), 'place')}"
    )


def _read(job: DedupJob, chunk: Chunk) -> tuple[list[bytes], list[bytes | None]]:
    """The texts of a chunk, and the line of each in a file of JSON; None: of another format."""
    data = read_chunk(chunk, job.spec)
    batch = parse(chunk.source.format, data, spec=job.spec)
    texts = [text.encode() for text in batch.columns[0].sentences]
    if chunk.source.format not in ("jsonl", "tar"):
        return texts, [None] * len(texts)
    rows = split_lines(data)
    return texts, [rows[number - 1] for number in batch.kept] if batch.kept is not None else list(rows)


def _rows(
    job: DedupJob, text: bytes, ends: list[int], lines: list[bytes | None], ranges: npt.NDArray[np.int64]
) -> Iterator[bytes]:
    """The rows to write."""
    begins, stops = ranges[:, 0], ranges[:, 1]
    for (begin, end), line in zip(pairwise(ends), lines, strict=True):
        # A range lies inside documents, but those of neighbours may touch.
        first, last = np.searchsorted(stops, begin, "right"), np.searchsorted(begins, end)
        inside = [(max(a, begin), min(b, end)) for a, b in ranges[first:last].tolist()]
        if not inside:
            yield line if line is not None else orjson.dumps({"text": text[begin:end].decode()})
            continue
        left = b"".join(_outside(text, begin, end, inside)).decode()
        if not left.strip():
            continue
        record: dict[str, Any] = {} if line is None else load_row(line)
        key = "text" if line is None else job.options.json_key
        if line is not None and key not in record:
            raise UsageError(f"{key!r} is inside another value", expected="a key of the top level, for --substring")
        yield dump_row({**record, key: left})


def _outside(text: bytes, begin: int, end: int, ranges: list[tuple[int, int]]) -> Iterator[bytes]:
    """The bytes of a document outside of ranges, which shrink to whole characters."""
    for start, stop in ranges:
        first, last = start, stop
        while first < stop and text[first] & 0xC0 == 0x80:
            first += 1
        while last > first and last < end and text[last] & 0xC0 == 0x80:
            last -= 1
        if first < last:
            yield text[begin:first]
            begin = last
    yield text[begin:end]


def _write(fd: int, rows: list[bytes]) -> None:
    atomic_io.write_all(fd, zstandard.ZstdCompressor(_LEVEL).compress(b"".join(row + b"\n" for row in rows)))
    rows.clear()
