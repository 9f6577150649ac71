"""Sources: files, folders and patterns of JSON lines, plain or gzip, as records that know their file and
row.
"""

from mdata.sources.files import SourceFile, check_unchanged, find_files
from mdata.sources.records import Problem, Record, RowError, parse_block, read_records
from mdata.sources.units import Block, Unit, blocks, plan_units, read_range

__all__ = [
    "Block",
    "Problem",
    "Record",
    "RowError",
    "SourceFile",
    "Unit",
    "blocks",
    "check_unchanged",
    "find_files",
    "parse_block",
    "plan_units",
    "read_range",
    "read_records",
]
