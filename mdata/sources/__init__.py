"""Sources: files, folders, patterns and standard input of JSON lines, parquet or plain text, packed or not, as
pieces of bounded size, and pieces as columns of text that know their rows. docs/input.md says what is taken.
"""

from mdata.sources.batch import Column, Problem, ReadSpec, RecordBatch
from mdata.sources.files import (
    STDIN,
    Compression,
    Format,
    Inputs,
    SourceFile,
    check_unchanged,
    find_files,
    find_inputs,
)
from mdata.sources.folders import Filter, LeftOut
from mdata.sources.piece import Piece, piece_digest, pieces, read_piece
from mdata.sources.readers import Record, parse, read_records, read_texts

__all__ = [
    "Column",
    "Compression",
    "Filter",
    "Format",
    "Inputs",
    "LeftOut",
    "Piece",
    "Problem",
    "ReadSpec",
    "Record",
    "RecordBatch",
    "STDIN",
    "SourceFile",
    "check_unchanged",
    "find_files",
    "find_inputs",
    "parse",
    "piece_digest",
    "pieces",
    "read_piece",
    "read_records",
    "read_texts",
]
