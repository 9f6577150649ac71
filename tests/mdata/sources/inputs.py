"""Shared by the tests of sources: texts compressed in every way, and readers of whole files."""

from __future__ import annotations

import bz2
import gzip
import lzma
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import zstandard

from mdata.sources.chunk import chunks, read_chunk
from mdata.sources.input_files import SourceFile, check_unchanged, find_inputs
from mdata.sources.parse import parse
from mdata.sources.record_batch import ReadSpec

PLAIN = ReadSpec()
READ_BYTES = 1 << 22
SKIPPABLE = b"\x5a\x2a\x4d\x18\x03\0\0\0abc"
PACKERS = {
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}
ENDINGS = {"none": "", "gzip": ".gz", "zstd": ".zst", "bzip2": ".bz2", "xz": ".xz"}


def packed(data: bytes, compression: str, cut: int = 0) -> bytes:
    """The data in two members, one of them possibly empty, with all that may legally stand around them."""
    if compression == "none":
        return data
    pack = PACKERS[compression]
    extra = {"gzip": b"\0" * 700, "zstd": SKIPPABLE, "xz": b"\0" * 8, "bzip2": b""}[compression]
    return pack(data[:cut]) + (extra if compression != "gzip" else b"") + pack(data[cut:]) + extra


def find_files(inputs, **options) -> list[SourceFile]:
    """The files of `find_inputs`."""
    return list(find_inputs(inputs, **options).files)


def read_records(file, keys, spec=PLAIN):
    """(row in the file, texts of each key) of every record up to the first bad row, which is raised as an error."""
    how = replace(spec, json_keys=tuple(keys))
    rows = 0
    for chunk in chunks([file], READ_BYTES, spec=how):
        found = parse(file.format, read_chunk(chunk, how), spec=how)
        bad = found.bad_rows[0] if found.bad_rows else None
        starts = [0] * len(found.columns)
        for number, row in enumerate(range(1, found.rows + 1) if found.kept is None else found.kept):
            if bad and row > bad.row:
                break
            ends = [number + 1 if column.ends is None else column.ends[number] for column in found.columns]
            spans = zip(found.columns, starts, ends, strict=True)
            yield rows + row, tuple(column.sentences[a:b] for column, a, b in spans)
            starts = ends
        if bad:
            raise bad.as_error(file.path, rows)
        rows += found.rows
    check_unchanged(file)


def write(folder: Path, data: bytes, compression: str = "none", *, name: str = "x.jsonl", cut: int = 0):
    """The data as a file of that compression; returns it as a SourceFile."""
    path = folder / (name + ENDINGS[compression])
    path.write_bytes(packed(data, compression, cut))
    (file,) = find_files([path])
    return file


def chunk_data(file, chunk_bytes, spec=PLAIN, **options):
    """The bytes of every chunk of a file."""
    return [read_chunk(chunk, spec) for chunk in chunks([file], chunk_bytes, spec=spec, **options)]


def batch(line, *, format="jsonl", **spec):
    """What a chunk parses to."""
    return parse(format, line, spec=ReadSpec(**spec))


def texts(file, chunk_bytes=1 << 20, spec=PLAIN):
    """Every document of a file's first key, and every bad_row as (row in the file, kind)."""
    documents, bad_rows, rows = [], [], 0
    for data in chunk_data(file, chunk_bytes, spec):
        found = parse(file.format, data, spec=spec)
        column = found.columns[0]
        starts = [0, *column.ends] if column.ends is not None else None
        documents += column.sentences if starts is None else [column.sentences[a:b] for a, b in pairwise(starts)]
        bad_rows += [(rows + bad_row.row, bad_row.kind) for bad_row in found.bad_rows]
        rows += found.rows
    return documents, bad_rows, rows
