"""Reading a .bin/.idx pair through memory maps, after checking that the two files fit each other.

Opening reads the .idx once, in blocks, and refuses whatever would give wrong tokens later: the rule is that
every byte of .bin belongs to exactly one sequence and every sequence to exactly one document (docs/formats.md
lists each check beside what Megatron does). The .bin is not read. Nothing is copied: all arrays are views of
the maps. Unusual: the tables of an .idx are not aligned (they begin at byte 34), which numpy reads correctly
and C++ would not, so blocks are copied before they are checked. Not done here: hashes (see the manifest),
multimodal files, object stores.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdata import _core
from mdata.errors import DamageError, os_errors_named
from mdata.indexed.format import (
    DTYPES,
    HEADER_BYTES,
    LENGTH_DTYPE,
    MAGIC,
    POINTER_DTYPE,
    VERSION,
    Header,
    bin_path,
    idx_path,
    unpack_header,
)
from mdata.indexed.legacy import LEGACY_HEAD_BYTES, legacy_form

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


@dataclass(frozen=True, eq=False)
class IndexTables:
    """What an .idx says, as views of its map; only header and size are checked. See `IndexedReader`."""

    dtype: np.dtype[np.generic]
    lengths: NDArray[np.int32]
    pointers: NDArray[np.int64]
    boundaries: NDArray[np.int64]

    def documents_touching(self, start: int, stop: int, *, contiguous: bool) -> list[tuple[int, int]]:
        """The documents with a token in bytes [start, stop) of .bin, as runs (first, last).

        Args:
            start, stop: 0 <= start < stop <= the size of .bin.
            contiguous: whether the sequences follow each other, so that they can be found without reading all.
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


class IndexedReader:
    """One pair, open for reading; views stay valid after the reader is gone.

    Args:
        prefix: the two names without their endings.

    Attributes:
        dtype: the token type.
        lengths: int32[S], tokens of each sequence.
        pointers: int64[S], byte offset of each sequence in .bin.
        boundaries: int64[D+1], the first sequence of each document, then S.
        contiguous: whether the sequences follow each other in .bin, so that it is one stream of tokens.
        num_tokens: tokens of all sequences.

    Raises:
        UsageError: a file is missing or cannot be read.
        DamageError: the pair is truncated, inconsistent or in another format; names the file and the field.

    Slow twin: mdata/reference/indexed.py.
    """

    def __init__(self, prefix: Path) -> None:
        self._idx = idx_path(Path(prefix))
        self._bin = bin_path(Path(prefix))
        tables = read_tables(self._idx)
        self._data = _map(self._bin)
        self.dtype = tables.dtype
        self.lengths, self.pointers, self.boundaries = tables.lengths, tables.pointers, tables.boundaries
        self.contiguous = self._check_sequences()
        self._check_boundaries()
        self.num_tokens = len(self._data) // self.dtype.itemsize

    @property
    def num_sequences(self) -> int:
        """Sequences in the pair."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        """Documents in the pair, empty ones included."""
        return len(self.boundaries) - 1

    def sequence(self, i: int) -> NDArray[Any]:
        """The tokens of sequence i, in the file's dtype, as a view of the map."""
        assert 0 <= i < self.num_sequences, f"sequence {i} of {self.num_sequences}"
        start = int(self.pointers[i])
        return self._data[start : start + int(self.lengths[i]) * self.dtype.itemsize].view(self.dtype)

    def tokens(self, start: int, count: int) -> NDArray[Any]:
        """Tokens [start, start + count) of .bin as one stream, in the file's dtype, as a view of the map."""
        assert self.contiguous, f"{self._idx}: the sequences do not follow each other"
        assert start >= 0 and 0 <= count <= self.num_tokens - start, (
            f"tokens {start} to {start + count} of {self.num_tokens}"
        )
        size = self.dtype.itemsize
        return self._data[start * size : (start + count) * size].view(self.dtype)

    def _check_sequences(self) -> bool:
        """Whether the sequences follow each other; refuses what does not cover .bin exactly once."""
        contiguous, expected, total = True, 0, 0
        for first in range(0, self.num_sequences, _ENTRIES_AT_ONCE):
            lengths = np.array(self.lengths[first : first + _ENTRIES_AT_ONCE], np.int32)
            pointers = np.array(self.pointers[first : first + _ENTRIES_AT_ONCE], np.int64)
            fault, entry, block_contiguous, expected, block_bytes = _core.check_sequences(
                lengths, pointers, self.dtype.itemsize, len(self._data), expected
            )
            if fault:
                found = f"length {lengths[entry]}, pointer {pointers[entry]}, .bin of {len(self._data)} bytes"
                field, wanted = _FAULTS[fault]
                raise _damage(self._idx, f"{field} of sequence {first + entry}", found, wanted)
            contiguous = contiguous and block_contiguous
            total += block_bytes
        if not contiguous:
            self._check_tiling()
        if total != len(self._data):
            raise DamageError(
                f"{self._bin}: its size is not what the .idx counts",
                found=f"{len(self._data)} bytes",
                expected=f"{total} bytes in {self.num_sequences} sequences of {self.dtype.name}",
                fix="make the pair again, or fetch both files of it again",
            )
        return contiguous

    def _check_tiling(self) -> None:
        """Sequences in another order than in .bin are fine; an overlap or a hole between two is not."""
        order = np.lexsort((self.lengths, self.pointers))
        starts = self.pointers[order]
        ends = starts + self.lengths[order] * np.int64(self.dtype.itemsize)
        expected = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
        wrong = np.flatnonzero(starts != expected)
        if wrong.size:
            first = int(wrong[0])
            kind = "overlaps another sequence" if starts[first] < expected[first] else "leaves a hole before it"
            raise _damage(
                self._idx,
                f"pointer of sequence {order[first]}",
                f"{starts[first]}, which {kind}",
                f"{expected[first]}: every byte of .bin belongs to one sequence",
            )

    def _check_boundaries(self) -> None:
        previous = -1
        for first in range(0, len(self.boundaries), _ENTRIES_AT_ONCE):
            block = np.array(self.boundaries[first : first + _ENTRIES_AT_ONCE], np.int64)
            fault, entry = _core.check_boundaries(block, self.num_sequences, previous)
            if fault:
                field, wanted = _FAULTS[fault]
                raise _damage(self._idx, f"document {field} {first + entry}", int(block[entry]), wanted)
            previous = int(block[-1])
        if previous != self.num_sequences:
            raise _damage(self._idx, "last document boundary", previous, f"{self.num_sequences}, the sequence count")


def read_tables(path: Path) -> IndexTables:
    """The tables of an .idx whose header and size are sound; their content is not judged here.

    Raises:
        UsageError: it cannot be read.
        DamageError: truncated, or in another format; names the field.
    """
    index = _map(path)
    header = _check_header(path, index)
    num_sequences = header.num_sequences
    return IndexTables(
        DTYPES[header.code],
        lengths=index[HEADER_BYTES:][: 4 * num_sequences].view(LENGTH_DTYPE),
        pointers=index[HEADER_BYTES + 4 * num_sequences :][: 8 * num_sequences].view(POINTER_DTYPE),
        boundaries=index[HEADER_BYTES + 12 * num_sequences :].view(POINTER_DTYPE),
    )


def _check_header(path: Path, index: NDArray[np.uint8]) -> Header:
    size = len(index)
    magic = index[: len(MAGIC)].tobytes()
    if form := legacy_form(index[:LEGACY_HEAD_BYTES].tobytes(), size):
        raise DamageError(
            f"{path}: bad {'magic' if form.endswith('TNTIDX') else 'size'}",
            found=f"{form}, an older format",
            expected="MMIDIDX with a table of documents",
            fix=f"mdata adopt {path.with_suffix('')} --convert NEWPREFIX",
        )
    if magic != MAGIC:
        raise _damage(path, "magic", repr(magic), repr(MAGIC))
    if size < HEADER_BYTES:
        raise _damage(path, "size", f"{size} bytes", f"at least the {HEADER_BYTES} bytes of a header")
    header = unpack_header(index[:HEADER_BYTES].tobytes())
    if header.version != VERSION:
        raise _damage(path, "version", header.version, f"{VERSION}, little endian")
    if header.code not in DTYPES:
        raise _damage(path, "dtype code", header.code, "1 to 8")
    if header.num_boundaries == 0:
        raise _damage(path, "boundary count", 0, "documents + 1, so at least 1")
    _check_size(path, size, header)
    return header


def _check_size(path: Path, size: int, header: Header) -> None:
    wanted = header.index_bytes
    counts = f"{header.num_sequences} sequences and {header.num_boundaries} boundaries"
    if header.num_sequences and size == wanted + header.num_sequences:
        raise _damage(path, "size", f"{size} bytes: one mode for each sequence", "no multimodal file")
    if size != wanted:
        raise _damage(path, "size", f"{size} bytes", f"{wanted} bytes for {counts}")


def _damage(path: Path, field: str, found: object, expected: str) -> DamageError:
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


def _map(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file as a read-only map; an empty file, which cannot be mapped, as an empty array."""
    with os_errors_named("reading"), path.open("rb") as file:
        if path.stat().st_size == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
