"""The tables of an .idx and its header; format and file size are checked here, the content is not.

Tables are views of a map, or of memory if nothing may be mapped. They are not aligned: they begin at byte 34.
`IndexTables.documents_touching` finds the documents in a damaged block of .bin. Wrong content is found by
`IndexedReader`, and by the C++ code that uses single entries.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdata.errors import DamageError, os_errors_named
from mdata.indexed.mapped_files import Identity, identity_of, map_bytes, read_bytes
from mdata.indexed.pair_format import (
    DTYPES,
    HEADER_BYTES,
    LEGACY_HEAD_BYTES,
    LENGTH_DTYPE,
    MAGIC,
    POINTER_DTYPE,
    VERSION,
    Header,
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
        found: set[int] = set()
        for at in range(0, len(self.lengths), _ENTRIES_AT_ONCE):
            starts = self.pointers[at : at + _ENTRIES_AT_ONCE]
            ends = starts + self.lengths[at : at + _ENTRIES_AT_ONCE] * np.int64(size)
            hits = np.flatnonzero((starts < stop) & (ends > start) & (starts < ends))
            found.update(self._document_of(at + int(hit)) for hit in hits)
        return _runs(sorted(found))

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


def read_header(path: Path) -> tuple[Header, Identity]:
    """Read the header of an .idx and check the size; also returns the file's identity.

    Raises:
        UsageError, DamageError: as `read_tables`.
    """
    with os_errors_named("reading"), regular_file(path).open("rb", buffering=0) as file:
        facts = os.fstat(file.fileno())
        return _check_header(path, file.read(LEGACY_HEAD_BYTES) or b"", facts.st_size), identity_of(facts)


def _check_header(path: Path, head: bytes, size: int) -> Header:
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


def _check_size(path: Path, size: int, header: Header) -> None:
    wanted = header.index_bytes
    counts = f"{header.num_sequences} sequences and {header.num_boundaries} boundaries"
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
