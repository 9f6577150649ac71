"""Writing one .bin/.idx pair as a stream, in bounded memory, hashing on the way.

Token bytes go to a temporary .bin beside the final name as they come; lengths and document boundaries go to
two spool files, because the .idx begins with their number. `finish` makes everything lasting and only then
gives the final names: the old .idx goes first, then the .bin takes its name, then the .idx, with the folder
synced between, so that an .idx that exists speaks of the .bin beside it. Not done here: tokenizing, the
manifest, resuming.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import blake3
import numpy as np
from numpy.typing import NDArray

from mdata import _core, durable
from mdata.errors import BadInputError, UsageError, os_errors_named
from mdata.indexed.format import (
    BLOCK_BYTES,
    DTYPES,
    LARGEST_LENGTH,
    LENGTH_DTYPE,
    POINTER_DTYPE,
    bin_path,
    idx_path,
    pack_header,
)

_ENTRIES_AT_ONCE = 1 << 18  # of a spool, while the .idx is put together: 3 MB


class Position(NamedTuple):
    """How far a writer has come; always at the end of a document."""

    bin_bytes: int
    sequences: int
    documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFacts:
    """What is known of a pair that was just written.

    Attributes:
        dtype: numpy's name of the token type, such as "uint16".
        documents: number of documents, empty ones included.
        sequences: number of sequences.
        tokens: number of tokens.
        bin_bytes: size of .bin.
        largest_id: the largest token id, None without tokens.
        idx_hash: BLAKE3 of the whole .idx, in hex.
        block_hashes: BLAKE3 of each 4 MiB block of .bin, 32 bytes each; the last block may be shorter.
    """

    dtype: str
    documents: int
    sequences: int
    tokens: int
    bin_bytes: int
    largest_id: int | None
    idx_hash: str
    block_hashes: tuple[bytes, ...]


class IndexedWriter:
    """Writes `<prefix>.bin` and `<prefix>.idx`; temporary names until `finish`.

    A context manager: leaving the block without `finish`, or by an error, leaves nothing behind.

    Args:
        prefix: the two names without their endings; its folder must exist.
        dtype: the token type, an integer type of the format.

    Raises:
        UsageError: a dtype that holds no token ids, or a prefix that cannot be written.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[np.generic]) -> None:
        self._prefix = Path(prefix)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        if self._dtype not in DTYPES.values() or self._dtype.kind not in "iu":
            raise UsageError(
                f"{prefix}: token ids cannot be written as {dtype}",
                expected="uint8, int8, int16, int32, int64 or uint16",
            )
        self._sequences = 0
        self._documents = 0
        self._largest_id: int | None = None
        self._blocks = _BlockHashes()
        self._placed: list[Path] = []
        self._spools: list[_Spool] = []
        try:
            self._bin = self._open(bin_path(self._prefix))
            self._lengths = self._open(self._prefix.with_name(self._prefix.name + ".lengths"))
            self._boundaries = self._open(self._prefix.with_name(self._prefix.name + ".boundaries"))
            self._boundaries.append(np.zeros(1, POINTER_DTYPE))
        except BaseException:
            self.abandon()
            raise

    @property
    def position(self) -> Position:
        """Bytes of .bin, sequences and documents taken so far."""
        return Position(self._bin.size, self._sequences, self._documents)

    def append(
        self,
        tokens: NDArray[np.integer[Any]],
        lengths: NDArray[np.integer[Any]],
        *,
        document_ends: NDArray[np.integer[Any]],
    ) -> None:
        """Add whole documents.

        Args:
            tokens: integer[t], the ids of all sequences one after another.
            lengths: integer[n], tokens of each sequence; they sum to t.
            document_ends: integer[d], the number of sequences (of this call) up to the end of each document;
                an empty document repeats the value before it.

        Raises:
            BadInputError: an id that does not fit the token type, or a sequence of 2^31 tokens or more.
            ResourceError: the disk is full, or another fault of the file system.
        """
        _check_shapes(tokens, lengths, document_ends)
        _check_lengths(lengths, first=self._sequences, prefix=self._prefix)
        self._check_ids(tokens)
        data: NDArray[Any] = np.ascontiguousarray(tokens, self._dtype)
        self._bin.append(data)
        self._blocks.update(_raw(data))
        self._lengths.append(np.ascontiguousarray(lengths, LENGTH_DTYPE))
        ends = np.asarray(document_ends, POINTER_DTYPE) + self._sequences
        self._boundaries.append(ends)
        self._sequences += len(lengths)
        self._documents += len(document_ends)
        # Here every spool ends at the end of a document: after a sync of all three, a journal can record
        # `position` and a later run can cut the spools back to it.

    def finish(self) -> ShardFacts:
        """Make the pair lasting and give it its final names; nothing of ours is left if this fails.

        Raises:
            ResourceError: the disk is full, or another fault of the file system.
        """
        try:
            index = self._open(idx_path(self._prefix))
            idx_hash = self._write_index(index)
            for spool in (self._bin, index):
                spool.sync()
            self._place(index)
        except BaseException:
            self.abandon()
            raise
        self._placed.clear()
        self.abandon()
        return ShardFacts(
            dtype=self._dtype.name,
            documents=self._documents,
            sequences=self._sequences,
            tokens=self._bin.size // self._dtype.itemsize,
            bin_bytes=self._bin.size,
            largest_id=self._largest_id,
            idx_hash=idx_hash,
            block_hashes=self._blocks.finish(),
        )

    def abandon(self) -> None:
        """Remove everything that is not finished; does nothing after `finish`."""
        for spool in self._spools:
            spool.remove()
        self._spools.clear()
        for path in reversed(self._placed):
            path.unlink(missing_ok=True)
        self._placed.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def _open(self, path: Path) -> _Spool:
        spool = _Spool(path)
        self._spools.append(spool)
        return spool

    def _check_ids(self, tokens: NDArray[np.integer[Any]]) -> None:
        if not tokens.size:
            return
        smallest, largest = int(tokens.min()), int(tokens.max())
        # Negative ids are nothing a model reads, but Megatron's null tokenizer writes them where they fit.
        low, high = int(np.iinfo(self._dtype.name).min), int(np.iinfo(self._dtype.name).max)
        if smallest < low or largest > high:
            raise BadInputError(
                f"{self._prefix}: a token id does not fit {self._dtype.name}",
                found=f"id {smallest if smallest < low else largest} after {self._documents} documents",
                expected=f"ids from {low} to {high}",
                fix="a tokenizer whose ids fit its vocabulary size, or a wider token type",
            )
        self._largest_id = largest if self._largest_id is None else max(self._largest_id, largest)

    def _write_index(self, index: _Spool) -> str:
        """Header, lengths, pointers, boundaries, in blocks; returns the hash of it all."""
        hasher = blake3.blake3()
        sections = (
            self._lengths.blocks(LENGTH_DTYPE),
            self._pointers(),
            self._boundaries.blocks(POINTER_DTYPE),
        )
        header = pack_header(self._dtype, num_sequences=self._sequences, num_documents=self._documents)
        hasher.update(header)
        index.append(np.frombuffer(header, np.uint8))
        for section in sections:
            for block in section:
                hasher.update(_raw(block))
                index.append(block)
        return hasher.hexdigest()

    def _pointers(self) -> Iterator[NDArray[np.int64]]:
        start = 0
        for lengths in self._lengths.blocks(LENGTH_DTYPE):
            pointers, start = _core.pointers_from_lengths(lengths, self._dtype.itemsize, start)
            yield pointers

    def _place(self, index: _Spool) -> None:
        """Give the final names, in the order that never shows an .idx beside the wrong .bin."""
        folder = self._prefix.parent
        with os_errors_named(f"finishing {self._prefix}"):
            if index.path.exists():
                index.path.unlink()
                durable.sync_folder(folder)
            for spool in (self._bin, index):
                durable.rename(spool.partial, spool.path)
                self._placed.append(spool.path)
                durable.sync_folder(folder)


class _Spool:
    """A temporary file beside its final name that is appended to and, once written, read back in blocks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = durable.partial_path(path)
        self.size = 0
        with os_errors_named(f"creating {path}"):
            self._fd = durable.open_alone(self.partial)

    def append(self, data: NDArray[Any]) -> None:
        with os_errors_named(f"writing {self.path}"):
            durable.write_all(self._fd, _raw(data))
        self.size += data.nbytes

    def sync(self) -> None:
        with os_errors_named(f"writing {self.path}"):
            durable.sync(self._fd)

    def blocks(self, dtype: np.dtype[np.generic]) -> Iterator[NDArray[Any]]:
        """Everything appended so far, as arrays of `dtype`."""
        step = _ENTRIES_AT_ONCE * dtype.itemsize
        for offset in range(0, self.size, step):
            data = os.pread(self._fd, min(step, self.size - offset), offset)
            yield np.frombuffer(data, dtype)

    def remove(self) -> None:
        os.close(self._fd)
        self.partial.unlink(missing_ok=True)


class _BlockHashes:
    """BLAKE3 of each block of a stream, whatever the pieces in which it comes."""

    def __init__(self) -> None:
        self._finished: list[bytes] = []
        self._hasher = blake3.blake3()
        self._filled = 0

    def update(self, data: memoryview) -> None:
        while data:
            piece = data[: BLOCK_BYTES - self._filled]
            self._hasher.update(piece)
            self._filled += len(piece)
            data = data[len(piece) :]
            if self._filled == BLOCK_BYTES:
                self._close_block()

    def finish(self) -> tuple[bytes, ...]:
        if self._filled:
            self._close_block()
        return tuple(self._finished)

    def _close_block(self) -> None:
        self._finished.append(self._hasher.digest())
        self._hasher = blake3.blake3()
        self._filled = 0


def _raw(array: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array; Python cannot cast the view of an empty one."""
    return array.data.cast("B") if array.size else memoryview(b"")


def _check_shapes(
    tokens: NDArray[np.integer[Any]],
    lengths: NDArray[np.integer[Any]],
    document_ends: NDArray[np.integer[Any]],
) -> None:
    """Guard against a caller whose three arrays do not fit together."""
    for name, array in (("tokens", tokens), ("lengths", lengths), ("document_ends", document_ends)):
        assert array.ndim == 1 and array.dtype.kind in "iu", f"{name}: integers of one dimension are expected"
    total = int(lengths.sum(dtype=np.int64))
    assert total == len(tokens), f"lengths sum to {total} for {len(tokens)} tokens"
    ends = np.concatenate(([0], document_ends))
    assert (np.diff(ends) >= 0).all(), "document_ends decrease"
    assert ends[-1] == len(lengths), f"the documents end at {ends[-1]} of {len(lengths)} sequences"


def _check_lengths(lengths: NDArray[np.integer[Any]], *, first: int, prefix: Path) -> None:
    if not lengths.size:
        return
    assert int(lengths.min()) >= 0, "a length is negative"
    worst = int(lengths.argmax())
    if lengths[worst] > LARGEST_LENGTH:
        raise BadInputError(
            f"{prefix}: sequence {first + worst} is too long for the format",
            found=f"{lengths[worst]} tokens",
            expected=f"at most {LARGEST_LENGTH}",
            fix="split the document",
        )
