"""Reads a .bin/.idx pair, by memory maps or by pread, after checking that the two files fit each other.

The .idx is read once at opening, in blocks, and errors that would give wrong tokens are refused: every byte of .bin
belongs to exactly one sequence and every sequence to exactly one document (docs/reference/formats.md lists each check).
If a manifest describes the pair, only the header is read at opening, and the .idx is compared with its hash before the
first use of any table: a stream of tokens needs no table, so such a corpus opens at once. The .bin is not read. Maps
are not copied: if a file is truncated under a map, C++ readers raise an error, but Python code that reads the arrays
dies with SIGBUS. Mode "pread" maps nothing: tokens are read on demand through a few open files, and tables are kept in
memory after their first use. Unusual: the tables are not aligned (they begin at byte 34), so blocks are copied before
C++ checks them; with `facts` another process can continue without opening or reading anything first. Not done here:
hashes of .bin, multimodal files.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from mdata import _core
from mdata.errors import DamageError, MdataError, UsageError
from mdata.indexed.index_tables import IndexTables, check_tables, damaged_field, read_header, read_tables
from mdata.indexed.mapped_files import Identity, explain, hash_file, lies_at, look_at, map_bytes, pooled
from mdata.indexed.pair_format import DTYPES, HEADER_BYTES, LENGTH_DTYPE, POINTER_DTYPE, bin_path, idx_path

Mode = Literal["mmap", "pread"]
MODES: tuple[str, ...] = get_args(Mode)


class Described(NamedTuple):
    """The recorded hash of the .idx: the file that records it, and BLAKE3 of the whole .idx in hex."""

    by: Path
    idx_hash: str


class PairFacts(NamedTuple):
    """The facts about a pair that another process needs to open the same two files when it first reads them.

    `compared`: the .idx has its recorded hash, or no hash is recorded.
    """

    dtype_code: int
    num_sequences: int
    num_documents: int
    contiguous: bool
    idx: Identity
    bin: Identity
    compared: bool


class IndexedReader:
    """One pair, open for reading; views stay valid after the reader is gone.

    Args:
        prefix: the two names without their endings.
        mode: "mmap", or "pread" where the file system or the memory limit rules out maps.
        contiguous: from the manifest; the tables are then checked at their first use.
        described: the hash in the manifest; the .idx is compared with it before a table is first used.
        known_facts: of the same pair, opened before: nothing is opened until the first read.

    Attributes:
        facts: to pass as `known_facts` in another process. described: as given.
        dtype: the token type.
        contiguous: whether the sequences are contiguous in .bin, so that it is one stream of tokens.
        num_sequences: sequences in the pair. num_documents: documents, including empty ones.
        num_tokens: tokens of all sequences.

    Raises:
        UsageError: a file is missing or cannot be read.
        DamageError: the pair is truncated, inconsistent or in another format; names the file and the field.

    Slow twin: tests/reference/indexed.py.
    """

    def __init__(
        self,
        prefix: Path,
        *,
        mode: Mode = "mmap",
        contiguous: bool | None = None,
        described: Described | None = None,
        known_facts: PairFacts | None = None,
    ) -> None:
        if mode not in MODES:
            raise UsageError(f"no mode {mode!r} of reading", expected=" or ".join(MODES))
        self.mode = mode
        self.prefix = Path(prefix)
        self.described = described
        facts = self._look(contiguous) if known_facts is None else known_facts
        self.facts = facts
        self.dtype = DTYPES[facts.dtype_code]
        self.num_sequences = facts.num_sequences
        self.num_documents = facts.num_documents
        self.bin_bytes = facts.bin[2]
        self.num_tokens = self.bin_bytes // self.dtype.itemsize
        self.contiguous = facts.contiguous
        if known_facts is not None:
            return
        self._hold()
        if contiguous is None:
            self.contiguous = self._judge()
            self.facts = facts._replace(contiguous=self.contiguous)

    @property
    def idx_path(self) -> Path:
        """Path of the index; computed on demand, because a corpus may have very many readers."""
        return idx_path(self.prefix)

    @property
    def bin_path(self) -> Path:
        """The tokens."""
        return bin_path(self.prefix)

    def _look(self, contiguous: bool | None) -> PairFacts:
        header, idx = read_header(self.idx_path)
        sizes = header.num_sequences, header.num_boundaries - 1
        return PairFacts(header.code, *sizes, bool(contiguous), idx, look_at(self.bin_path), self.described is None)

    def _hold(self) -> None:
        """Map or open the .bin, so that errors are raised now and a later file with its name is not mistaken for it."""
        if self.file is None:
            assert self.data is not None, "neither a map nor a file"
        else:
            self._read(self.file, 0, 0)

    def unchanged(self) -> bool:
        """Whether both files are still the ones that the facts describe."""
        return lies_at(self.idx_path, self.facts.idx) and lies_at(self.bin_path, self.facts.bin)

    @cached_property
    def data(self) -> NDArray[np.uint8] | None:
        """The bytes of .bin; None in mode "pread"."""
        return map_bytes(self.bin_path, self.facts.bin) if self.mode == "mmap" else None

    @cached_property
    def file(self) -> _core.PooledFile | None:
        """The .bin in mode "pread"."""
        return pooled(self.bin_path, self.facts.bin) if self.mode == "pread" else None

    @property
    def tables(self) -> IndexTables:
        """The tables of an .idx that matches its hash; their consistency is not checked here.

        Raises:
            DamageError: the .idx does not have the hash in its manifest.
        """
        self.compare()
        return self._stored

    def compare(self) -> None:
        """Compare the .idx with its hash, unless this process or the one that made `known_facts` has already done so.

        The file is read, not mapped, so that a failing disk gives an error. One thread hashes 1e7 documents (200 MB) in
        0.045 s.

        Raises:
            DamageError: it has another hash, or is not the file that was opened. ResourceError: it cannot be read.
        """
        if self.facts.compared:
            return
        assert self.described is not None, "nothing to compare with"
        try:
            hashed = hash_file(self.idx_path, self.facts.idx)
        except OSError as error:
            raise explain(error, self.idx_path) from error
        if hashed != self.described.idx_hash:
            raise self._altered(f"hash {hashed}")
        self.facts = self.facts._replace(compared=True)

    def alteration(self) -> DamageError | None:
        """The error message if the .idx no longer has its hash; None if it has. Reads the whole file."""
        if self.described is None:
            return None
        try:
            hashed = hash_file(self.idx_path)
        except OSError as error:
            return self._altered(str(error))
        return None if hashed == self.described.idx_hash else self._altered(f"hash {hashed}")

    def _altered(self, found: str) -> DamageError:
        assert self.described is not None, "nothing to compare with"
        by = self.described.by
        return DamageError(
            f"{self.idx_path} is not the one that {by.name} describes, so no sample can be read with it",
            found=found,
            expected=f"hash {self.described.idx_hash}",
            fix=f"`mdata verify {by}` for details; then fetch both files of the pair again, or make the pair again",
        )

    @cached_property
    def _stored(self) -> IndexTables:
        """The tables, unchecked."""
        return read_tables(self.idx_path, mapped=self.mode == "mmap", identity=self.facts.idx)

    @cached_property
    def _checked(self) -> IndexTables:
        """The tables, after checking them."""
        self.compare()
        self.check_structure()
        return self._stored

    def check_structure(self) -> None:
        """Check that the tables fit each other, the .bin and the manifest, regardless of the hash.

        Raises:
            DamageError: as at opening.
        """
        contiguous = self._judge()
        if contiguous != self.contiguous:
            problem = f"{self.idx_path}: the sequences are not laid out as its manifest says"
            raise DamageError(problem, found=f"contiguous: {contiguous}", expected=str(self.contiguous))

    def check(self) -> None:
        """Check the hash and the tables now, not at their first use.

        Raises:
            DamageError: as at opening.
        """
        _ = self._checked

    def _judge(self) -> bool:
        return check_tables(self._stored, idx=self.idx_path, bin=self.bin_path, bin_bytes=self.bin_bytes)

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
        """The stream position at which a sequence begins; for the number of sequences, the number of tokens.

        Reads this entry and the previous one; the first call compares the .idx with its hash.

        Raises:
            DamageError: another hash, or contradictory entries.
        """
        assert self.contiguous, f"{self.idx_path}: the sequences do not follow each other"
        assert 0 <= sequence <= self.num_sequences, f"sequence {sequence} of {self.num_sequences}"
        if sequence in (0, self.num_sequences):
            return self.num_tokens if sequence else 0
        self.compare()
        length, before, start = self._entries(sequence)
        size = self.dtype.itemsize
        if before < 0 or length < 0 or start > self.bin_bytes or before + length * size != start or start % size:
            values = f"{start}, after pointer {before} and length {length}"
            raise damaged_field(
                self.idx_path,
                f"pointer of sequence {sequence}",
                found=values,
                expected="the end of the sequence before it",
            )
        return start // size

    def _entries(self, sequence: int) -> tuple[int, int, int]:
        """Length and pointer of the previous sequence, and the pointer of this one."""
        if self.mode == "mmap":
            tables = self._stored
            length, pointers = tables.lengths[sequence - 1], tables.pointers[sequence - 1 : sequence + 1]
        else:
            index = pooled(self.idx_path, self.facts.idx)
            of_lengths, of_pointers = HEADER_BYTES, HEADER_BYTES + 4 * self.num_sequences
            (length,) = self._read(index, of_lengths + 4 * (sequence - 1), 4).view(LENGTH_DTYPE)
            pointers = self._read(index, of_pointers + 8 * (sequence - 1), 16).view(POINTER_DTYPE)
        return int(length), int(pointers[0]), int(pointers[1])

    def sequence(self, i: int) -> NDArray[Any]:
        """The tokens of sequence i, in the file's dtype; a view if the file is mapped."""
        assert 0 <= i < self.num_sequences, f"sequence {i} of {self.num_sequences}"
        start = int(self.pointers[i])
        return self._bytes(start, start + int(self.lengths[i]) * self.dtype.itemsize).view(self.dtype)

    def tokens(self, start: int, count: int) -> NDArray[Any]:
        """Tokens [start, start + count) of .bin as one stream, in the file's dtype; a view if the file is mapped."""
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
        data = self._read(self.file, start, stop - start)
        if len(data) < stop - start:
            raise self.read_fault(start + len(data), 0)
        return data

    def _read(self, file: _core.PooledFile, start: int, count: int) -> NDArray[np.uint8]:
        try:
            return np.frombuffer(file.read(start, count), np.uint8)
        except OSError as error:
            raise explain(error, self.bin_path if file is self.file else self.idx_path) from error

    def read_fault(self, byte: int, error: int) -> MdataError:
        """The error for a byte of .bin that could not be read, from the system's errno; 0: the file ends there."""
        end = byte
        with suppress(OSError):
            end = min(byte, self.bin_path.stat().st_size)
        # Mapped bytes past the end raise the same error as those of a failing disk.
        if error and (error != errno.EIO or end == byte):
            return explain(OSError(error, ""), self.bin_path)
        return DamageError(
            f"{self.bin_path}: it is shorter than when it was opened",
            found=f"its end at byte {end}",
            expected=f"{self.bin_bytes} bytes",
            fix="do not change a corpus while it is read; fetch the pair again",
        )


def compare_all(readers: Sequence[IndexedReader]) -> None:
    """Compare each .idx with its hash (`IndexedReader.compare`), with one thread per core.

    Raises:
        DamageError, ResourceError: as in `compare`, for the first that differs.
    """
    waiting = [reader for reader in readers if not reader.facts.compared]
    if len(waiting) < 2:
        for reader in waiting:
            reader.compare()
        return
    from concurrent.futures import ThreadPoolExecutor  # imports a lot

    from mdata.util.machine_limits import usable_cores

    with ThreadPoolExecutor(min(len(waiting), usable_cores())) as pool:
        deque(pool.map(IndexedReader.compare, waiting), maxlen=0)
