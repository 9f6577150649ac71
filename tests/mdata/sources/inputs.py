"""What the tests of sources share: texts packed in every way, and readers of whole files."""

from __future__ import annotations

import bz2
import gzip
import lzma
from itertools import pairwise
from pathlib import Path

import zstandard

from mdata.sources.chunk import pieces, read_piece
from mdata.sources.input_files import find_files
from mdata.sources.parse import parse
from mdata.sources.record_batch import ReadSpec

PLAIN = ReadSpec()
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


def write(folder: Path, data: bytes, compression: str = "none", *, name: str = "x.jsonl", cut: int = 0):
    """The data as a file of that compression; returns it as a SourceFile."""
    path = folder / (name + ENDINGS[compression])
    path.write_bytes(packed(data, compression, cut))
    (file,) = find_files([path])
    return file


def piece_data(file, piece_bytes, spec=PLAIN, **options):
    """The bytes of every piece of a file."""
    return [read_piece(piece, spec) for piece in pieces([file], piece_bytes, spec=spec, **options)]


def batch(line, *, format="jsonl", **spec):
    """What a piece parses to."""
    return parse(format, line, spec=ReadSpec(**spec))


def texts(file, piece_bytes=1 << 20, spec=PLAIN):
    """Every document of a file's first key, and every problem as (row in the file, kind)."""
    documents, problems, rows = [], [], 0
    for data in piece_data(file, piece_bytes, spec):
        found = parse(file.format, data, spec=spec)
        column = found.columns[0]
        starts = [0, *column.ends] if column.ends is not None else None
        documents += column.sentences if starts is None else [column.sentences[a:b] for a, b in pairwise(starts)]
        problems += [(rows + problem.row, problem.kind) for problem in found.problems]
        rows += found.rows
    return documents, problems, rows
