"""Reads pairs of older formats: TNTIDX (Megatron's "lazy" and "cached" files, and fairseq's), fairseq's MMIDIDX.

Nothing in a TNTIDX file says which variant it is, but its size does; fairseq's MMIDIDX has no table of documents. A
reader serves only conversion: it checks the whole index as `IndexedReader` does (every byte of .bin belongs to one
sequence, every sequence to one document) and then gives the documents in order, in groups, with `pread` into bounded
memory. Without known boundaries each sequence is a document. Unusual: the codes 6 and 7 both mean a 64-bit float here,
and offsets of code 6 count units of 4 bytes. Not done here: items of more than one dimension; subtracting the 1 that
fairseq adds to each id (mdata/corpus/convert.py).

Slow twin: tests/reference/legacy.py.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from mdata.errors import DamageError, os_errors_named
from mdata.indexed.pair_format import (
    DTYPES,
    LEGACY_HEAD_BYTES,
    MMAP_HEADER,
    OLD_HEADER,
    VERSION,
    Form,
    bin_path,
    idx_path,
    legacy_form,
)
from mdata.util import atomic_io
from mdata.util.arrays import running_sums
from mdata.util.regular_files import regular_file

# Codes of older formats that differ from today's; 9 and 10 are fairseq's.
LEGACY_DTYPES = {**DTYPES, 7: np.dtype("<f8"), 9: np.dtype("<u4"), 10: np.dtype("<u8")}
_INT64 = np.dtype("<i8")
_ENTRIES_AT_ONCE = 1 << 16
_DOCUMENTS_AT_ONCE = 1 << 12
_GROUP_BYTES = 4 << 20


class DocumentGroup(NamedTuple):
    """Some whole documents, in the form that `IndexedWriter.append` takes."""

    tokens: NDArray[Any]
    lengths: NDArray[np.int64]
    document_ends: NDArray[np.int64]


class _File:
    """A file read by position, never mapped: a failing disk gives an error and does not kill the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with os_errors_named("reading"):
            self._open = atomic_io.Descriptor(os.open(regular_file(path), os.O_RDONLY | os.O_CLOEXEC))
            try:
                self.size = os.fstat(self._open.fd).st_size
            except BaseException:
                self.close()
                raise

    def read(self, offset: int, count: int) -> bytearray:
        """Exactly these bytes."""
        data = bytearray(count)
        filled = 0
        with os_errors_named(f"reading {self.path}"):
            while filled < count and (taken := os.preadv(self._open.fd, [memoryview(data)[filled:]], offset + filled)):
                filled += taken
        if filled < count:
            raise DamageError(f"{self.path} became shorter while it was read", fix="wait until no program writes to it")
        return data

    def close(self) -> None:
        self._open.close()


@dataclass(frozen=True)
class _IntegerTable:
    """Integers in a file."""

    file: _File
    offset: int
    count: int
    dtype: np.dtype[np.generic] = _INT64

    def read(self, first: int, last: int) -> NDArray[np.int64]:
        """Entries [first, last)."""
        size = self.dtype.itemsize
        raw = self.file.read(self.offset + first * size, (last - first) * size)
        return np.frombuffer(raw, self.dtype).astype(np.int64)

    @property
    def end(self) -> int:
        """The first byte after the table."""
        return self.offset + self.count * self.dtype.itemsize


@dataclass(frozen=True)
class _Layout:
    """The content of the header, with the file size checked.

    Attributes:
        unit_bytes: the unit of `offsets`.
        dimensions: offsets of items in the table of sizes; TNTIDX only.
        boundaries: None if the format has none.
    """

    form: Form
    dtype: np.dtype[np.generic]
    unit_bytes: int
    lengths: _IntegerTable
    offsets: _IntegerTable
    dimensions: _IntegerTable | None
    boundaries: _IntegerTable | None


class LegacyReader:
    """One pair of an older format; a context manager.

    Attributes:
        close: closes both files.
        form: which of the three formats.
        dtype: of the tokens; 64-bit float if the code says float.
        has_boundaries: whether the file records which sequences form a document.

    Raises:
        UsageError: a file is missing or cannot be read.
        DamageError: truncated, inconsistent or in another format; names the file and the field.
    """

    def __init__(self, prefix: Path) -> None:
        with ExitStack() as opened:
            self._index = opened.enter_context(closing(_File(idx_path(Path(prefix)))))
            self._data = opened.enter_context(closing(_File(bin_path(Path(prefix)))))
            self._layout = _layout(self._index)
            self.form, self.dtype = self._layout.form, self._layout.dtype
            self.num_sequences = self._layout.lengths.count
            self._check_sequences()
            self._boundaries = self._checked_boundaries()
            self.close = opened.pop_all().close
        self.has_boundaries = self._boundaries is not None
        self.num_documents = self.num_sequences if self._boundaries is None else self._boundaries.count - 1
        self.num_tokens = self._data.size // self.dtype.itemsize
        self.num_bytes = self._data.size

    def groups(self) -> Iterator[DocumentGroup]:
        """All documents in order, in groups of some MiB of tokens, or one larger document."""
        start = 0
        for first in range(0, self.num_documents, _DOCUMENTS_AT_ONCE):
            ends = self._document_ends(first, min(first + _DOCUMENTS_AT_ONCE, self.num_documents))
            lengths = self._layout.lengths.read(int(ends[0]), int(ends[-1]))
            ends -= ends[0]
            tokens_before = running_sums(lengths)[ends]
            for a, b in pairwise(_cuts(tokens_before * self.dtype.itemsize)):
                count = int(tokens_before[b] - tokens_before[a])
                raw = self._data.read(start * self.dtype.itemsize, count * self.dtype.itemsize)
                start += count
                yield DocumentGroup(
                    np.frombuffer(raw, self.dtype), lengths[ends[a] : ends[b]], ends[a + 1 : b + 1] - ends[a]
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _document_ends(self, first: int, last: int) -> NDArray[np.int64]:
        """Boundaries [first, last]."""
        if self._boundaries is None:
            return np.arange(first, last + 1)
        return self._boundaries.read(first, last + 1)

    def _check_sequences(self) -> None:
        """Check that every sequence begins where the previous one ends, and that together they cover the .bin."""
        for first in range(0, max(self.num_sequences, 1), _ENTRIES_AT_ONCE):
            last = min(first + _ENTRIES_AT_ONCE, self.num_sequences)
            lengths, edges = self._layout.lengths.read(first, last), self._edges(first, last)
            if self._layout.dimensions is not None:
                dimensions = self._layout.dimensions.read(first, last + 1)
                self._refuse("dimension offset", first, dimensions, dimensions == np.arange(first, last + 1))
            self._refuse("length of sequence", first, lengths, (lengths >= 0) & (lengths <= self._data.size))
            limit = self._data.size // self._layout.unit_bytes
            self._refuse("offset of sequence", first, edges, (edges >= 0) & (edges <= limit))
            edges *= self._layout.unit_bytes
            follows = np.diff(edges) == lengths * self.dtype.itemsize
            self._refuse("length of sequence", first, lengths, follows, "the next offset minus its own")
        begin, end = (int(self._edges(at, at)[0]) for at in (0, self.num_sequences))
        if begin != 0 or end * self._layout.unit_bytes != self._data.size:
            raise DamageError(
                f"{self._data.path}: its size does not match the .idx",
                found=f"{self._data.size} bytes",
                expected=f"sequences from byte {begin} to {end * self._layout.unit_bytes}",
                fix=_FETCH,
            )

    def _edges(self, first: int, last: int) -> NDArray[np.int64]:
        """Where sequences [first, last) begin, and where the last one ends, in units."""
        offsets = self._layout.offsets
        edges = offsets.read(first, min(last + 1, offsets.count))
        if last < offsets.count:
            return edges
        return np.append(edges, self._data.size)  # fairseq's MMIDIDX does not write the last end

    def _checked_boundaries(self) -> _IntegerTable | None:
        """The boundaries; None if a merge has lost them: Megatron's merged files keep only the first."""
        table = self._layout.boundaries
        if table is None or (table.count == 1 and self.num_sequences and table.read(0, 1)[0] == 0):
            return None
        previous = 0
        for first in range(0, table.count, _ENTRIES_AT_ONCE):
            block = table.read(first, min(first + _ENTRIES_AT_ONCE, table.count))
            good = (block >= np.append(previous, block[:-1])) & (block <= self.num_sequences)
            good[0] &= first > 0 or block[0] == 0
            self._refuse("document boundary", first, block, good)
            previous = int(block[-1])
        if previous != self.num_sequences:
            raise _bad(self._index.path, "last document boundary", previous, f"{self.num_sequences}, the sequences")
        return table

    def _refuse(
        self, field: str, first: int, values: NDArray[np.int64], good: NDArray[np.bool_], expected: str | None = None
    ) -> None:
        wrong = np.flatnonzero(~good)
        if wrong.size:
            at = int(wrong[0])
            raise _bad(self._index.path, f"{field} {first + at}", int(values[at]), expected or _EXPECTED[field])


_FETCH = "fetch both files of the pair again"
_EXPECTED = {
    "dimension offset": "its own number, since items have one dimension",
    "length of sequence": "0 or more, within .bin",
    "offset of sequence": "an offset within .bin",
    "document boundary": "no less than the one before it, the first 0, at most the number of sequences",
}


def legacy_form_of(prefix: Path) -> Form | None:
    """The older format of a pair; None if it has none of them.

    Raises:
        UsageError: there is no .idx.
    """
    with closing(_File(idx_path(prefix))) as index:
        return legacy_form(bytes(index.read(0, min(index.size, LEGACY_HEAD_BYTES))), index.size)


def _layout(index: _File) -> _Layout:
    head = bytes(index.read(0, min(index.size, LEGACY_HEAD_BYTES)))
    form = legacy_form(head, index.size)
    if form is None:
        raise _bad(index.path, "magic or size", repr(head[:9]), "an older format")
    return _mmap_layout(index, head) if form == "fairseq's MMIDIDX" else _old_layout(index, head, form)


def _old_layout(index: _File, head: bytes, form: Form) -> _Layout:
    counted = form == "Megatron's TNTIDX"
    begin = OLD_HEADER.size + 8 * counted
    if len(head) < begin:
        raise _bad(index.path, "size", f"{index.size} bytes", f"at least the {begin} bytes of a header")
    _, version, code, item_bytes, items, sizes = OLD_HEADER.unpack_from(head)
    (boundaries,) = struct.unpack_from("<Q", head, OLD_HEADER.size) if counted else (0,)
    dtype = _dtype(index, version, code)
    declared = (4, 8) if dtype.kind == "f" else (dtype.itemsize,)
    if item_bytes not in declared:
        raise _bad(index.path, "item size", item_bytes, f"{declared[-1]} bytes for code {code}, {dtype.name}")
    wanted = 8 * (6 + 2 * (items + 1) + sizes + (1 + boundaries if counted else 0))
    if index.size != wanted:
        raise _bad(index.path, "size", f"{index.size} bytes", f"{wanted} for {items} items, {boundaries} boundaries")
    if sizes != items:
        raise _bad(index.path, "number of sizes", sizes, f"{items}, one for each item, since items have one dimension")
    if counted and not boundaries:
        raise _bad(index.path, "boundary count", 0, "documents + 1, so at least 1")
    dimensions = _IntegerTable(index, begin, items + 1)
    offsets = _IntegerTable(index, dimensions.end, items + 1)
    lengths = _IntegerTable(index, offsets.end, sizes)
    table = _IntegerTable(index, lengths.end, boundaries) if counted else None
    return _Layout(form, dtype, item_bytes, lengths, offsets, dimensions, table)


def _mmap_layout(index: _File, head: bytes) -> _Layout:
    _, version, code, sequences = MMAP_HEADER.unpack_from(head)
    dtype = _dtype(index, version, code)
    lengths = _IntegerTable(index, MMAP_HEADER.size, sequences, np.dtype("<i4"))
    return _Layout("fairseq's MMIDIDX", dtype, 1, lengths, _IntegerTable(index, lengths.end, sequences), None, None)


def _dtype(index: _File, version: int, code: int) -> np.dtype[np.generic]:
    if version != VERSION:
        raise _bad(index.path, "version", version, f"{VERSION}, little endian")
    if code not in LEGACY_DTYPES:
        raise _bad(index.path, "dtype code", code, "1 to 10")
    return LEGACY_DTYPES[code]


def _cuts(bytes_before: NDArray[np.int64]) -> Iterator[int]:
    """The first document of each group, and the end; a group holds as many as fit, at least one."""
    at = 0
    while at < len(bytes_before) - 1:
        yield at
        fits = int(np.searchsorted(bytes_before, bytes_before[at] + _GROUP_BYTES, side="right")) - 1
        at = max(fits, at + 1)
    yield len(bytes_before) - 1


def _bad(path: Path, field: str, found: object, expected: str) -> DamageError:
    return DamageError(f"{path}: bad {field}", found=str(found), expected=expected, fix=_FETCH)
