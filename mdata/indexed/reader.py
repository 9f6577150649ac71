"""Reading a .bin/.idx pair, by memory maps or by pread, after checking that the two files fit each other.

The .idx is read once, in blocks, and what would give wrong tokens is refused: every byte of .bin belongs to exactly
one sequence and every sequence to exactly one document (docs/formats.md lists each check). That is done at opening,
or, where a manifest has said already what the pair holds, when a table is first used: a stream of tokens needs none,
so a corpus of any size opens at once. The .bin is not read. Maps are not copied; if a file is cut under them, who reads
by C++ has an error, and who reads their arrays dies with SIGBUS. Mode "pread" maps nothing: tokens are read when they
are asked for, by a few open files, and tables, once used, lie in memory. Unusual: the tables are not aligned (they
begin at byte 34), so blocks are copied before C++ checks them; `facts` let another process go on without opening or
reading anything first. Not done here: hashes (see the manifest), multimodal files, object stores.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from mdata import _core
from mdata.errors import DamageError, MdataError, UsageError
from mdata.indexed.files import Identity, explain, lies_at, look_at, map_bytes, pooled
from mdata.indexed.format import DTYPES, HEADER_BYTES, LENGTH_DTYPE, POINTER_DTYPE, bin_path, idx_path
from mdata.indexed.tables import IndexTables, damaged_field, read_header, read_tables

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


class PairFacts(NamedTuple):
    """What opening a pair finds out: all that another process needs to open the same two files when it reads them."""

    dtype_code: int
    num_sequences: int
    num_documents: int
    contiguous: bool
    idx: Identity
    bin: Identity


class IndexedReader:
    """One pair, open for reading; views stay valid after the reader is gone.

    Args:
        prefix: the two names without their endings.
        mode: "mmap", or "pread" for file systems and memory limits that maps do not suit.
        contiguous: what a manifest says of the pair; its tables are then checked when they are first used.
        known: of the same pair, opened before: nothing is looked at or opened until it is read.

    Attributes:
        facts: what `known` is for another process.
        dtype: the token type.
        contiguous: whether the sequences follow each other in .bin, so that it is one stream of tokens.
        num_sequences: sequences in the pair. num_documents: documents, empty ones included.
        num_tokens: tokens of all sequences.

    Raises:
        UsageError: a file is missing or cannot be read.
        DamageError: the pair is truncated, inconsistent or in another format; names the file and the field.

    Slow twin: mdata/reference/indexed.py.
    """

    def __init__(
        self, prefix: Path, *, mode: Mode = "mmap", contiguous: bool | None = None, known: PairFacts | None = None
    ) -> None:
        if mode not in MODES:
            raise UsageError(f"no way to read called {mode!r}", expected=" or ".join(MODES))
        self.mode = mode
        self.idx_path = idx_path(Path(prefix))
        self.bin_path = bin_path(Path(prefix))
        facts = self._look(contiguous) if known is None else known
        self.facts = facts
        self.dtype = DTYPES[facts.dtype_code]
        self.num_sequences = facts.num_sequences
        self.num_documents = facts.num_documents
        self.bin_bytes = facts.bin[2]
        self.num_tokens = self.bin_bytes // self.dtype.itemsize
        self.contiguous = facts.contiguous
        if known is not None:
            return
        self._hold()
        if contiguous is None:
            self.contiguous = self._check(self.tables)
            self.facts = facts._replace(contiguous=self.contiguous)

    def _look(self, contiguous: bool | None) -> PairFacts:
        header, idx = read_header(self.idx_path)
        sizes = header.num_sequences, header.num_boundaries - 1
        return PairFacts(header.code, *sizes, bool(contiguous), idx, look_at(self.bin_path))

    def _hold(self) -> None:
        """Map or open the .bin, so that what cannot be is said now, and a later file of its name not taken for it."""
        if self.file is None:
            assert self.data is not None, "neither a map nor a file"
        else:
            self._read(self.file, 0, 0)

    def unchanged(self) -> bool:
        """Whether both files are still, or are here, the ones that the facts speak of."""
        return lies_at(self.idx_path, self.facts.idx) and lies_at(self.bin_path, self.facts.bin)

    @cached_property
    def data(self) -> NDArray[np.uint8] | None:
        """The bytes of .bin; None in mode "pread"."""
        return map_bytes(self.bin_path, self.facts.bin) if self.mode == "mmap" else None

    @cached_property
    def file(self) -> _core.PooledFile | None:
        """The .bin in mode "pread"."""
        return pooled(self.bin_path, self.facts.bin) if self.mode == "pread" else None

    @cached_property
    def tables(self) -> IndexTables:
        """The tables as they stand in the file, their content not judged."""
        return read_tables(self.idx_path, mapped=self.mode == "mmap", identity=self.facts.idx)

    @cached_property
    def _checked(self) -> IndexTables:
        """The tables, found sound."""
        contiguous = self._check(self.tables)
        if contiguous != self.contiguous:
            what = f"{self.idx_path}: the sequences do not lie as its manifest says"
            raise DamageError(what, found=f"contiguous: {contiguous}", expected=str(self.contiguous))
        return self.tables

    def check(self) -> None:
        """Judge the tables now, not when one is first used.

        Raises:
            DamageError: as at opening.
        """
        _ = self._checked

    def _check(self, tables: IndexTables) -> bool:
        """Whether the sequences follow each other; what would give wrong tokens is refused."""
        contiguous = self._check_sequences(tables)
        self._check_boundaries(tables)
        return contiguous

    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32[S], tokens of each sequence."""
        return self._checked.lengths

    @property
    def pointers(self) -> NDArray[np.int64]:
        """int64[S], byte offset of each sequence in .bin."""
        return self._checked.pointers

    @property
    def boundaries(self) -> NDArray[np.int64]:
        """int64[D+1], the first sequence of each document, then S."""
        return self._checked.boundaries

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
            raise damaged_field(
                self.idx_path,
                f"pointer of sequence {sequence}",
                found=found,
                expected="the end of the sequence before it",
            )
        return start // size

    def _entries(self, sequence: int) -> tuple[int, int, int]:
        """Length and pointer of the sequence before this one, and its own pointer."""
        if self.mode == "mmap":
            tables = self.tables
            length, pointers = tables.lengths[sequence - 1], tables.pointers[sequence - 1 : sequence + 1]
        else:
            index = pooled(self.idx_path, self.facts.idx)
            of_lengths, of_pointers = HEADER_BYTES, HEADER_BYTES + 4 * self.num_sequences
            (length,) = self._read(index, of_lengths + 4 * (sequence - 1), 4).view(LENGTH_DTYPE)
            pointers = self._read(index, of_pointers + 8 * (sequence - 1), 16).view(POINTER_DTYPE)
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
        found = self._read(self.file, start, stop - start)
        if len(found) < stop - start:
            raise self.read_fault(start + len(found), 0)
        return found

    def _read(self, file: _core.PooledFile, start: int, count: int) -> NDArray[np.uint8]:
        try:
            return np.frombuffer(file.read(start, count), np.uint8)
        except OSError as error:
            raise explain(error, self.bin_path if file is self.file else self.idx_path) from error

    def read_fault(self, byte: int, error: int) -> MdataError:
        """Why the .bin did not give this byte: by the system's error, or 0 where the file ends there."""
        end = byte
        with suppress(OSError):
            end = min(byte, self.bin_path.stat().st_size)
        # Mapped bytes behind the end are the same error as those of a failing disk.
        if error and (error != errno.EIO or end == byte):
            return explain(OSError(error, ""), self.bin_path)
        return DamageError(
            f"{self.bin_path}: it is shorter than when it was opened",
            found=f"its end at byte {end}",
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
                raise damaged_field(self.idx_path, f"{field} of sequence {first + entry}", found=found, expected=wanted)
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
            raise damaged_field(
                self.idx_path,
                f"pointer of sequence {order[first]}",
                found=f"{starts[first]}, which {kind}",
                expected=f"{expected[first]}: every byte of .bin belongs to one sequence",
            )

    def _check_boundaries(self, tables: IndexTables) -> None:
        previous = -1
        for first in range(0, len(tables.boundaries), _ENTRIES_AT_ONCE):
            block = np.array(tables.boundaries[first : first + _ENTRIES_AT_ONCE], np.int64)
            fault, entry = _core.check_boundaries(block, self.num_sequences, previous)
            if fault:
                field, wanted = _FAULTS[fault]
                raise damaged_field(
                    self.idx_path, f"document {field} {first + entry}", found=int(block[entry]), expected=wanted
                )
            previous = int(block[-1])
        if previous != self.num_sequences:
            raise damaged_field(
                self.idx_path,
                "last document boundary",
                found=previous,
                expected=f"{self.num_sequences}, the sequence count",
            )
