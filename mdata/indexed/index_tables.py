"""The tables of an .idx and its header: read, and compared with each other and the .bin.

Format and file size are checked when the tables are read. `check_tables` checks their content, as listed in
docs/reference/formats.md: every byte of .bin belongs to exactly one sequence, and every sequence to exactly one
document. Sequences may be stored in another order than they are numbered, without overlaps and holes. Whether the
tables are the ones that were written is not checked here: only a hash shows that. Single entries are also checked by
the C++ code that uses them.

Tables are views of a map, or of memory if nothing may be mapped. They are not aligned, as they begin at byte 34, so
blocks of them are copied before C++ checks them. `IndexTables.documents_touching` finds the documents in a damaged
block of .bin.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdata import _core
from mdata.errors import DamageError, counted, os_errors_named
from mdata.indexed.mapped_files import Identity, identity_of, map_bytes, read_bytes
from mdata.indexed.pair_format import (
    DTYPES,
    HEADER_BYTES,
    LEGACY_HEAD_BYTES,
    LENGTH_DTYPE,
    MAGIC,
    POINTER_DTYPE,
    VERSION,
    IdxHeader,
    legacy_form,
    unpack_header,
)
from mdata.util.regular_files import regular_file

_ENTRIES_AT_ONCE = 1 << 18


@dataclass(frozen=True, eq=False)
class IndexTables:
    """The tables of an .idx as views of its map; only header and size are checked. See `IndexedReader`."""

    dtype: np.dtype[np.generic]
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    boundaries: NDArray[np.int64]

    def documents_touching(self, start: int, stop: int, *, contiguous: bool) -> list[tuple[int, int]]:
        """The documents with a token in bytes [start, stop) of .bin, as runs (first, last).

        Args:
            start, stop: 0 <= start < stop <= the size of .bin.
            contiguous: whether the sequences are contiguous in .bin, so that they can be found without reading all.
        """
        size = self.dtype.itemsize
        if contiguous:
            sequences = range(len(self.lengths))
            first = bisect_right(sequences, start, key=lambda i: int(self.pointers[i]) + int(self.lengths[i]) * size)
            last = bisect_left(sequences, stop, key=lambda i: int(self.pointers[i])) - 1
            return [(self._document_of(first), self._document_of(last))] if first <= last else []
        documents: set[int] = set()
        for at in range(0, len(self.lengths), _ENTRIES_AT_ONCE):
            starts = self.pointers[at : at + _ENTRIES_AT_ONCE]
            ends = starts + self.lengths[at : at + _ENTRIES_AT_ONCE] * np.int64(size)
            hits = np.flatnonzero((starts < stop) & (ends > start) & (starts < ends))
            documents.update(self._document_of(at + int(hit)) for hit in hits)
        return _runs(sorted(documents))

    def _document_of(self, sequence: int) -> int:
        return bisect_right(self.boundaries, sequence) - 1


def read_tables(path: Path, *, mapped: bool = True, identity: Identity | None = None) -> IndexTables:
    """Read the tables of an .idx and check header and size; their content is not checked here.

    Raises:
        UsageError: it cannot be read.
        DamageError: truncated, in another format (names the field), or not the file with this identity.
    """
    index = map_bytes(path, identity) if mapped else read_bytes(path, identity)
    header = _check_header(path, index[:LEGACY_HEAD_BYTES].tobytes(), len(index))
    num_sequences = header.num_sequences
    return IndexTables(
        DTYPES[header.code],
        lengths=index[HEADER_BYTES:][: 4 * num_sequences].view(LENGTH_DTYPE),
        pointers=index[HEADER_BYTES + 4 * num_sequences :][: 8 * num_sequences].view(POINTER_DTYPE),
        boundaries=index[HEADER_BYTES + 12 * num_sequences :].view(POINTER_DTYPE),
    )


def read_header(path: Path) -> tuple[IdxHeader, Identity]:
    """Read the header of an .idx and check the size; also returns the file's identity.

    Raises:
        UsageError, DamageError: as `read_tables`.
    """
    with os_errors_named("reading"), regular_file(path).open("rb", buffering=0) as file:
        facts = os.fstat(file.fileno())
        return _check_header(path, file.read(LEGACY_HEAD_BYTES) or b"", facts.st_size), identity_of(facts)


def _check_header(path: Path, head: bytes, size: int) -> IdxHeader:
    magic = head[: len(MAGIC)]
    if form := legacy_form(head, size):
        raise DamageError(
            f"{path}: bad {'magic' if form.endswith('TNTIDX') else 'size'}",
            found=f"{form}, an older format",
            expected="MMIDIDX with a table of documents",
            fix=f"mdata adopt {path.with_suffix('')} --convert NEWPREFIX",
        )
    if magic != MAGIC:
        raise damaged_field(path, "magic", found=repr(magic), expected=repr(MAGIC))
    if size < HEADER_BYTES:
        raise damaged_field(
            path, "size", found=f"{size} bytes", expected=f"at least the {HEADER_BYTES} bytes of a header"
        )
    header = unpack_header(head[:HEADER_BYTES])
    if header.version != VERSION:
        raise damaged_field(path, "version", found=header.version, expected=f"{VERSION}, little endian")
    if header.code not in DTYPES:
        raise damaged_field(path, "dtype code", found=header.code, expected="1 to 8")
    if header.num_boundaries == 0:
        raise damaged_field(path, "boundary count", found=0, expected="documents + 1, so at least 1")
    _check_size(path, size, header)
    return header


def _check_size(path: Path, size: int, header: IdxHeader) -> None:
    wanted = header.index_bytes
    counts = (
        f"{counted(header.num_sequences, 'sequence')} and {counted(header.num_boundaries, 'boundary', 'boundaries')}"
    )
    if header.num_sequences and size == wanted + header.num_sequences:
        raise damaged_field(
            path, "size", found=f"{size} bytes: one mode for each sequence", expected="no multimodal file"
        )
    if size != wanted:
        raise damaged_field(path, "size", found=f"{size} bytes", expected=f"{wanted} bytes for {counts}")


def damaged_field(path: Path, field: str, *, found: object, expected: str) -> DamageError:
    """The error for an impossible value in a field of a pair's file."""
    return DamageError(
        f"{path}: bad {field}",
        found=str(found),
        expected=expected,
        fix="make the pair again, or fetch both files of it again",
    )


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """[1, 2, 3, 7] -> [(1, 3), (7, 7)]."""
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i + 1 == len(numbers) or numbers[i + 1] != n + 1]
    return list(zip(starts, ends, strict=True))


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
            expected=f"{total} bytes in {counted(len(tables.lengths), 'sequence')} of {tables.dtype.name}",
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
            values = f"length {lengths[entry]}, pointer {pointers[entry]}, .bin of {bin_bytes} bytes"
            field, wanted = _FAULTS[fault]
            raise damaged_field(idx, f"{field} of sequence {first + entry}", found=values, expected=wanted)
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
