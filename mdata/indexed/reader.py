"""Reading a .bin/.idx pair, by memory maps or by pread, after checking that the two files fit each other.

The .idx is read once, in blocks, and what would give wrong tokens is refused: every byte of .bin belongs to exactly
one sequence and every sequence to exactly one document (docs/formats.md lists each check). That is done at opening,
or, where a manifest has said already what the pair holds, when a table is first used: a stream of tokens needs none,
so a corpus of any size opens at once. The .bin is not read. Maps are not copied; they die with SIGBUS if a file is
cut under them, which no program can prevent. Mode "pread" maps nothing: tokens are read when they are asked for, and
tables, once used, lie in memory. Unusual: the tables are not aligned (they begin at byte 34), so blocks are copied
before C++ checks them. Not done here: hashes (see the manifest), multimodal files, object stores.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mdata import _core
from mdata.errors import DamageError, ResourceError, UsageError, explain_os_error, os_errors_named
from mdata.indexed.format import (
    DTYPES,
    HEADER_BYTES,
    LEGACY_HEAD_BYTES,
    LENGTH_DTYPE,
    MAGIC,
    POINTER_DTYPE,
    VERSION,
    Header,
    bin_path,
    idx_path,
    legacy_form,
    unpack_header,
)

Mode = Literal["mmap", "pread"]
MODES: tuple[str, ...] = get_args(Mode)

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
        mode: "mmap", or "pread" for file systems and memory limits that maps do not suit.
        contiguous: what a manifest says of the pair; its tables are then checked when they are first used.

    Attributes:
        dtype: the token type.
        contiguous: whether the sequences follow each other in .bin, so that it is one stream of tokens.
        num_sequences: sequences in the pair. num_documents: documents, empty ones included.
        num_tokens: tokens of all sequences.

    Raises:
        UsageError: a file is missing or cannot be read.
        DamageError: the pair is truncated, inconsistent or in another format; names the file and the field.

    Slow twin: mdata/reference/indexed.py.
    """

    def __init__(self, prefix: Path, *, mode: Mode = "mmap", contiguous: bool | None = None) -> None:
        if mode not in MODES:
            raise UsageError(f"no way to read called {mode!r}", expected=" or ".join(MODES))
        self.mode = mode
        self.idx_path = idx_path(Path(prefix))
        self.bin_path = bin_path(Path(prefix))
        header = read_header(self.idx_path)
        # Held from here on, so that a file of the same name that comes later is not taken for this one.
        self.data: NDArray[np.uint8] | None = _map(self.bin_path) if mode == "mmap" else None
        self.file = _open(self.bin_path) if mode == "pread" else None
        self.dtype = DTYPES[header.code]
        self.num_sequences = header.num_sequences
        self.num_documents = header.num_boundaries - 1
        self.bin_bytes = (
            os.fstat(self.file.fileno()).st_size if self.file else 0 if self.data is None else len(self.data)
        )
        self.num_tokens = self.bin_bytes // self.dtype.itemsize
        self._said = contiguous
        self.contiguous: bool = self._checked[1] if contiguous is None else contiguous
        if self.num_tokens * self.dtype.itemsize != self.bin_bytes:
            raise _damage(self.bin_path, "size", f"{self.bin_bytes} bytes", f"whole tokens of {self.dtype.name}")

    @cached_property
    def tables(self) -> IndexTables:
        """The tables as they stand in the file, their content not judged."""
        return read_tables(self.idx_path, mapped=self.mode == "mmap")

    @cached_property
    def _checked(self) -> tuple[IndexTables, bool]:
        """The tables, found sound, and whether the sequences follow each other."""
        tables = self.tables
        if (len(tables.lengths), len(tables.boundaries)) != (self.num_sequences, self.num_documents + 1):
            raise DamageError(f"{self.idx_path} was replaced while it was in use")
        contiguous = self._check_sequences(tables)
        self._check_boundaries(tables)
        if self._said not in (None, contiguous):
            what = f"{self.idx_path}: the sequences do not lie as its manifest says"
            raise DamageError(what, found=f"contiguous: {contiguous}", expected=str(self._said))
        return tables, contiguous

    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32[S], tokens of each sequence."""
        return self._checked[0].lengths

    @property
    def pointers(self) -> NDArray[np.int64]:
        """int64[S], byte offset of each sequence in .bin."""
        return self._checked[0].pointers

    @property
    def boundaries(self) -> NDArray[np.int64]:
        """int64[D+1], the first sequence of each document, then S."""
        return self._checked[0].boundaries

    def first_token(self, sequence: int) -> int:
        """The token of the stream with which a sequence begins; for the number of sequences, the number of tokens.

        Reads this entry and the one before it, and checks only these two.

        Raises:
            DamageError: they contradict each other.
        """
        assert self.contiguous, f"{self.idx_path}: the sequences do not follow each other"
        assert 0 <= sequence <= self.num_sequences, f"sequence {sequence} of {self.num_sequences}"
        if sequence in (0, self.num_sequences):
            return self.num_tokens if sequence else 0
        length, before, start = self._entries(sequence)
        size = self.dtype.itemsize
        if before < 0 or length < 0 or start > self.bin_bytes or before + length * size != start or start % size:
            found = f"{start}, behind pointer {before} and length {length}"
            raise _damage(self.idx_path, f"pointer of sequence {sequence}", found, "the end of the sequence before it")
        return start // size

    def _entries(self, sequence: int) -> tuple[int, int, int]:
        """Length and pointer of the sequence before this one, and its own pointer."""
        if self.mode == "mmap":
            tables = self.tables
            length, pointers = tables.lengths[sequence - 1], tables.pointers[sequence - 1 : sequence + 1]
        else:
            offset = HEADER_BYTES + 4 * self.num_sequences + 8 * (sequence - 1)
            with os_errors_named("reading"):
                (length,) = np.fromfile(self.idx_path, LENGTH_DTYPE, 1, offset=HEADER_BYTES + 4 * (sequence - 1))
                pointers = np.fromfile(self.idx_path, POINTER_DTYPE, 2, offset=offset)
        return int(length), int(pointers[0]), int(pointers[1])

    def sequence(self, i: int) -> NDArray[Any]:
        """The tokens of sequence i, in the file's dtype; a view of the map where there is one."""
        assert 0 <= i < self.num_sequences, f"sequence {i} of {self.num_sequences}"
        start = int(self.pointers[i])
        return self._bytes(start, start + int(self.lengths[i]) * self.dtype.itemsize).view(self.dtype)

    def tokens(self, start: int, count: int) -> NDArray[Any]:
        """Tokens [start, start + count) of .bin as one stream, in the file's dtype; a view where there is a map."""
        assert self.contiguous, f"{self.idx_path}: the sequences do not follow each other"
        assert start >= 0 and 0 <= count <= self.num_tokens - start, (
            f"tokens {start} to {start + count} of {self.num_tokens}"
        )
        size = self.dtype.itemsize
        return self._bytes(start * size, (start + count) * size).view(self.dtype)

    def _bytes(self, start: int, stop: int) -> NDArray[np.uint8]:
        if self.data is not None:
            return self.data[start:stop]
        assert self.file is not None, "neither a map nor a file"
        found = bytearray()
        while len(found) < stop - start:
            with os_errors_named(f"reading {self.bin_path}"):
                part = os.pread(self.file.fileno(), stop - start - len(found), start + len(found))
            if not part:
                raise self.ends_at(start + len(found))
            found += part
        return np.frombuffer(bytes(found), np.uint8)

    def ends_at(self, byte: int) -> DamageError:
        """That the .bin ends here, earlier than when it was opened."""
        return DamageError(
            f"{self.bin_path}: it is shorter than when it was opened",
            found=f"its end at byte {byte}",
            expected=f"{self.bin_bytes} bytes",
            fix="do not change a corpus while it is read; fetch the pair again",
        )

    def _check_sequences(self, tables: IndexTables) -> bool:
        """Whether the sequences follow each other; refuses what does not cover .bin exactly once."""
        contiguous, expected, total = True, 0, 0
        for first in range(0, self.num_sequences, _ENTRIES_AT_ONCE):
            lengths = np.array(tables.lengths[first : first + _ENTRIES_AT_ONCE], np.int32)
            pointers = np.array(tables.pointers[first : first + _ENTRIES_AT_ONCE], np.int64)
            fault, entry, block_contiguous, expected, block_bytes = _core.check_sequences(
                lengths, pointers, self.dtype.itemsize, self.bin_bytes, expected
            )
            if fault:
                found = f"length {lengths[entry]}, pointer {pointers[entry]}, .bin of {self.bin_bytes} bytes"
                field, wanted = _FAULTS[fault]
                raise _damage(self.idx_path, f"{field} of sequence {first + entry}", found, wanted)
            contiguous = contiguous and block_contiguous
            total += block_bytes
        if not contiguous:
            self._check_tiling(tables)
        if total != self.bin_bytes:
            raise DamageError(
                f"{self.bin_path}: its size is not what the .idx counts",
                found=f"{self.bin_bytes} bytes",
                expected=f"{total} bytes in {self.num_sequences} sequences of {self.dtype.name}",
                fix="make the pair again, or fetch both files of it again",
            )
        return contiguous

    def _check_tiling(self, tables: IndexTables) -> None:
        """Sequences in another order than in .bin are fine; an overlap or a hole between two is not."""
        order = np.lexsort((tables.lengths, tables.pointers))
        starts = tables.pointers[order]
        ends = starts + tables.lengths[order] * np.int64(self.dtype.itemsize)
        expected = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
        wrong = np.flatnonzero(starts != expected)
        if wrong.size:
            first = int(wrong[0])
            kind = "overlaps another sequence" if starts[first] < expected[first] else "leaves a hole before it"
            raise _damage(
                self.idx_path,
                f"pointer of sequence {order[first]}",
                f"{starts[first]}, which {kind}",
                f"{expected[first]}: every byte of .bin belongs to one sequence",
            )

    def _check_boundaries(self, tables: IndexTables) -> None:
        previous = -1
        for first in range(0, len(tables.boundaries), _ENTRIES_AT_ONCE):
            block = np.array(tables.boundaries[first : first + _ENTRIES_AT_ONCE], np.int64)
            fault, entry = _core.check_boundaries(block, self.num_sequences, previous)
            if fault:
                field, wanted = _FAULTS[fault]
                raise _damage(self.idx_path, f"document {field} {first + entry}", int(block[entry]), wanted)
            previous = int(block[-1])
        if previous != self.num_sequences:
            raise _damage(
                self.idx_path, "last document boundary", previous, f"{self.num_sequences}, the sequence count"
            )


def read_tables(path: Path, *, mapped: bool = True) -> IndexTables:
    """The tables of an .idx whose header and size are sound; their content is not judged here.

    Raises:
        UsageError: it cannot be read.
        DamageError: truncated, or in another format; names the field.
    """
    index = _map(path) if mapped else _read(path)
    header = _check_header(path, index[:LEGACY_HEAD_BYTES].tobytes(), len(index))
    num_sequences = header.num_sequences
    return IndexTables(
        DTYPES[header.code],
        lengths=index[HEADER_BYTES:][: 4 * num_sequences].view(LENGTH_DTYPE),
        pointers=index[HEADER_BYTES + 4 * num_sequences :][: 8 * num_sequences].view(POINTER_DTYPE),
        boundaries=index[HEADER_BYTES + 12 * num_sequences :].view(POINTER_DTYPE),
    )


def read_header(path: Path) -> Header:
    """The header of an .idx of the right size.

    Raises:
        UsageError, DamageError: as `read_tables`.
    """
    with os_errors_named("reading"), path.open("rb", buffering=0) as file:
        return _check_header(path, file.read(LEGACY_HEAD_BYTES) or b"", os.fstat(file.fileno()).st_size)


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
        raise _damage(path, "magic", repr(magic), repr(MAGIC))
    if size < HEADER_BYTES:
        raise _damage(path, "size", f"{size} bytes", f"at least the {HEADER_BYTES} bytes of a header")
    header = unpack_header(head[:HEADER_BYTES])
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
    """The bytes of a file as a read-only map, which holds no descriptor."""
    try:
        return _core.map_file(os.fsencode(path))
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise explain_os_error(error, "reading") from error
        raise ResourceError(
            f"reading: {path}: no more maps, or no more address space",
            fix='mode "pread", a larger vm.max_map_count, or corpora merged into fewer shards',
        ) from error


def _read(path: Path) -> NDArray[np.uint8]:
    with os_errors_named(f"reading {path}"):
        return np.fromfile(path, np.uint8)


def _open(path: Path) -> BinaryIO:
    with os_errors_named("reading"):
        return path.open("rb", buffering=0)
