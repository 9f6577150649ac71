"""Checks that the tables of an .idx fit each other and the .bin; docs/formats.md lists each check.

Every byte of .bin belongs to exactly one sequence, and every sequence to exactly one document. Sequences may be stored
in another order than they are numbered, without overlaps and holes. The tables are not aligned, so blocks of them are
copied before C++ checks them. Whether the tables are the ones that were written is not checked here: only a hash shows
that.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mdata import _core
from mdata.errors import DamageError
from mdata.indexed.index_tables import IndexTables, damaged_field

_ENTRIES_AT_ONCE = 1 << 18

_FAULTS = {
    "length_negative": ("length", "0 or more"),
    "pointer_negative": ("pointer", "0 or more"),
    "pointer_unaligned": ("pointer", "a multiple of the token's size"),
    "pointer_past_end": ("pointer", "a sequence that ends within .bin"),
    "boundary_start": ("boundary", "0, the first sequence"),
    "boundary_decreases": ("boundary", "no less than the boundary before it"),
    "boundary_past_end": ("boundary", "at most the number of sequences"),
}


def check_tables(tables: IndexTables, *, idx: Path, bin: Path, bin_bytes: int) -> bool:
    """Whether the sequences follow each other.

    Args:
        tables: with a valid header and size.
        idx, bin: the files, for messages.
        bin_bytes: size of .bin.

    Raises:
        DamageError: an error that would give wrong tokens; names the file and the field.
    """
    contiguous, total = _check_sequences(tables, idx, bin_bytes)
    if not contiguous:
        _check_tiling(tables, idx)
    if total != bin_bytes:
        raise DamageError(
            f"{bin}: its size does not match the .idx",
            found=f"{bin_bytes} bytes",
            expected=f"{total} bytes in {len(tables.lengths)} sequences of {tables.dtype.name}",
            fix="make the pair again, or fetch both files of it again",
        )
    _check_boundaries(tables, idx)
    return contiguous


def _check_sequences(tables: IndexTables, idx: Path, bin_bytes: int) -> tuple[bool, int]:
    """Whether the sequences are contiguous, and their bytes; refuses sequences outside .bin."""
    contiguous, expected, total = True, 0, 0
    for first in range(0, len(tables.lengths), _ENTRIES_AT_ONCE):
        lengths = np.array(tables.lengths[first : first + _ENTRIES_AT_ONCE], np.int32)
        pointers = np.array(tables.pointers[first : first + _ENTRIES_AT_ONCE], np.int64)
        fault, entry, block_contiguous, expected, block_bytes = _core.check_sequences(
            lengths, pointers, tables.dtype.itemsize, bin_bytes, expected
        )
        if fault:
            found = f"length {lengths[entry]}, pointer {pointers[entry]}, .bin of {bin_bytes} bytes"
            field, wanted = _FAULTS[fault]
            raise damaged_field(idx, f"{field} of sequence {first + entry}", found=found, expected=wanted)
        contiguous = contiguous and block_contiguous
        total += block_bytes
    return contiguous, total


def _check_tiling(tables: IndexTables, idx: Path) -> None:
    """Check that sequences cover .bin; any order is allowed, overlaps and holes are not."""
    order = np.lexsort((tables.lengths, tables.pointers))
    starts = tables.pointers[order]
    ends = starts + tables.lengths[order] * np.int64(tables.dtype.itemsize)
    expected = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    wrong = np.flatnonzero(starts != expected)
    if wrong.size:
        first = int(wrong[0])
        kind = "overlaps another sequence" if starts[first] < expected[first] else "leaves a gap before it"
        raise damaged_field(
            idx,
            f"pointer of sequence {order[first]}",
            found=f"{starts[first]}, which {kind}",
            expected=f"{expected[first]}: every byte of .bin belongs to one sequence",
        )


def _check_boundaries(tables: IndexTables, idx: Path) -> None:
    previous = -1
    for first in range(0, len(tables.boundaries), _ENTRIES_AT_ONCE):
        block = np.array(tables.boundaries[first : first + _ENTRIES_AT_ONCE], np.int64)
        fault, entry = _core.check_boundaries(block, len(tables.lengths), previous)
        if fault:
            field, wanted = _FAULTS[fault]
            raise damaged_field(idx, f"document {field} {first + entry}", found=int(block[entry]), expected=wanted)
        previous = int(block[-1])
    if previous != len(tables.lengths):
        raise damaged_field(
            idx,
            "last document boundary",
            found=previous,
            expected=f"{len(tables.lengths)}, the sequence count",
        )
