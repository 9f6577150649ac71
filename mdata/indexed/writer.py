"""Writes one .bin/.idx pair as a stream, in bounded memory, and hashes while writing.

Token bytes go to a temporary .bin beside the final name; lengths and document boundaries go to two more temporary
files, because the .idx begins with their number. `checkpoint` syncs everything and returns a state from which a new
writer can continue. `stage` assembles the .idx, for results that are renamed together. `commit` does this and
then assigns the final names in this order: the old .idx is removed, the .bin is renamed, then the .idx, with the folder
synced in between, so that an .idx always describes the .bin beside it. Not done here: tokenizing, the manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import blake3
import numpy as np
from numpy.typing import NDArray

from mdata import _core
from mdata.errors import BadInputError, UsageError, counted, os_errors_named
from mdata.indexed.append_file import AppendFile, SyncPoint, raw_bytes, remove_synced
from mdata.indexed.pair_format import (
    BLOCK_BYTES,
    DTYPES,
    LARGEST_LENGTH,
    LENGTH_DTYPE,
    POINTER_DTYPE,
    bin_path,
    idx_path,
    pack_header,
)
from mdata.util import atomic_io

_WORTH_A_THREAD = 1 << 17  # bytes: 0.02 ms of hashing
_HASH_BYTES = 32


class WriterState(NamedTuple):
    """The position of a writer, always at the end of a document."""

    bin_bytes: int
    sequences: int
    documents: int
    largest_id: int | None
    sync_points: tuple[SyncPoint, ...] = ()  # of the four temporary files, in the order in which they are opened


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFacts:
    """The facts about a pair that was just written, for its manifest.

    Attributes:
        dtype: numpy's name of the token type, such as "uint16".
        documents: number of documents, including empty ones.
        sequences: number of sequences.
        tokens: number of tokens.
        bin_bytes: size of .bin.
        largest_id: the largest token id; None if there are no tokens.
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


class BlockHasher:
    """BLAKE3 of each 4 MiB block of a stream whose bytes arrive in pieces of any size.

    Only `flush` appends finished hashes to a file: `update` may run in a thread, and the order of disk calls must not
    depend on threads. The hash of an incomplete block is kept in memory; after a crash, the bytes of that block are
    read again.

    Args:
        file: receives the hash of each full block.
        begun: the bytes of the incomplete block, when a stream is continued.
    """

    def __init__(self, file: AppendFile, begun: bytes = b"") -> None:
        assert len(begun) < BLOCK_BYTES, "a full block is no longer open"
        self._file = file
        self._hasher = blake3.blake3(begun)
        self._filled = len(begun)
        self._finished = bytearray()

    def update(self, data: memoryview) -> None:
        """Add the next bytes of the stream."""
        while data:
            inside = data[: BLOCK_BYTES - self._filled]
            self._hasher.update(inside)
            self._filled += len(inside)
            data = data[len(inside) :]
            if self._filled == BLOCK_BYTES:
                self._finished += self._hasher.digest()
                self._hasher = blake3.blake3()
                self._filled = 0

    def flush(self) -> None:
        """Append the finished hashes to the file."""
        if self._finished:
            self._file.append(bytes(self._finished))
            self._finished.clear()

    def finish(self) -> tuple[bytes, ...]:
        """The hashes of all blocks, the last of which may be shorter."""
        self.flush()
        done = self._file.read(0, self._file.size)
        full = tuple(done[start : start + _HASH_BYTES] for start in range(0, len(done), _HASH_BYTES))
        return (*full, self._hasher.digest()) if self._filled else full


class IndexedWriter:
    """Writes `<prefix>.bin` and `<prefix>.idx`, under temporary names until `commit`.

    A context manager: leaving the block discards uncommitted files.

    Args:
        prefix: the two names without their endings; its folder must exist.
        dtype: the token type, an integer type of the format.
        resume: state of an earlier writer from which to continue (see `checkpoint` and `close`).

    Raises:
        UsageError: a dtype that cannot hold token ids, or a prefix that cannot be written.
        DamageError: the files of the earlier writer are missing or changed.
    """

    def __init__(self, prefix: Path, dtype: np.dtype[np.generic], *, resume: WriterState | None = None) -> None:
        self._prefix = Path(prefix)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        if self._dtype not in DTYPES.values() or self._dtype.kind not in "iu":
            raise UsageError(
                f"{prefix}: token ids cannot be written as {dtype}",
                expected="uint8, int8, int16, int32, int64 or uint16",
            )
        state = resume or WriterState(0, 0, 0, None)
        self._sequences = state.sequences
        self._documents = state.documents
        self._largest_id = state.largest_id
        # Its thread starts at the first large append, and ends when this writer is garbage collected.
        self._thread = ThreadPoolExecutor(1, "hasher")
        self._files: list[AppendFile] = []
        self._index: AppendFile | None = None
        try:
            self._open_spools(state, fresh=resume is None)
        except BaseException:
            if resume is None:
                self.discard()
            else:
                self.close()
            raise

    def _open_spools(self, state: WriterState, *, fresh: bool) -> None:
        assert fresh or len(state.sync_points) == 4, "a state to continue from comes from a checkpoint"
        points = (None,) * 4 if fresh else tuple(SyncPoint(*point) for point in state.sync_points)
        self._bin = self._open(bin_path(self._prefix), points[0])
        self._lengths = self._open(self._beside(".lengths"), points[1])
        self._boundaries = self._open(self._beside(".boundaries"), points[2])
        self._hashes = self._open(self._beside(".hashes"), points[3])
        if fresh:
            self._boundaries.append(np.zeros(1, POINTER_DTYPE))
        begun = state.bin_bytes % BLOCK_BYTES
        self._hasher = BlockHasher(self._hashes, self._bin.read(state.bin_bytes - begun, begun))

    @property
    def state(self) -> WriterState:
        """The position of this writer."""
        return WriterState(self._bin.size, self._sequences, self._documents, self._largest_id)

    def append(
        self,
        tokens: NDArray[np.integer[Any]],
        lengths: NDArray[np.integer[Any]],
        *,
        document_ends: NDArray[np.integer[Any]],
    ) -> None:
        """Add whole documents.

        Args:
            tokens: integer[t], the concatenated ids of all sequences.
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
        self._append_tokens(np.ascontiguousarray(tokens, self._dtype))
        self._lengths.append(np.ascontiguousarray(lengths, LENGTH_DTYPE))
        self._boundaries.append(np.asarray(document_ends, POINTER_DTYPE) + self._sequences)
        self._sequences += len(lengths)
        self._documents += len(document_ends)

    def checkpoint(self) -> WriterState:
        """Sync everything appended; a writer made with this state as `resume` continues from here.

        Raises:
            ResourceError: the disk is full, or another fault of the file system.
        """
        self._hasher.flush()
        return self.state._replace(sync_points=tuple(file.sync() for file in self._files))

    def stage(self) -> ShardFacts:
        """Write the .idx and sync the pair, still under temporary names.

        Raises:
            ResourceError: the disk is full, or another fault of the file system.
            DamageError: a temporary file was removed.
        """
        index = AppendFile(idx_path(self._prefix))
        try:
            idx_hash = self._write_index(index)
            for file in (self._bin, index):
                file.sync()
                file.check_name()
            block_hashes = self._hasher.finish()
        except BaseException:
            index.discard()
            raise
        self._index = index
        return ShardFacts(
            dtype=self._dtype.name,
            documents=self._documents,
            sequences=self._sequences,
            tokens=self._bin.size // self._dtype.itemsize,
            bin_bytes=self._bin.size,
            largest_id=self._largest_id,
            idx_hash=idx_hash,
            block_hashes=block_hashes,
        )

    def commit(self) -> ShardFacts:
        """Give the pair its final names; if this fails, everything is as before.

        The files needed to continue after `roll_back` stay until `discard`.

        Raises:
            ResourceError, DamageError: as `stage`.
        """
        facts = self.stage()
        assert self._index is not None, "the .idx was written"
        try:
            self._rename(self._index)
        finally:
            self._index.discard()
        return facts

    def roll_back(self) -> None:
        """Undo `commit`, so that a later run can continue."""
        if self._bin.committed:
            with os_errors_named(f"taking back {self._prefix}"):
                remove_synced(idx_path(self._prefix))
                self._bin.roll_back()

    def rest(self) -> None:
        """Close the files until they are used again; see `AppendFile.rest`."""
        for file in self._all_files():
            file.rest()

    def close(self) -> None:
        """Stop writing; uncommitted files stay for a writer that resumes."""
        for file in self._all_files():
            file.close()
        self._files.clear()

    def discard(self) -> None:
        """Remove everything that is not committed; does nothing the second time."""
        with ExitStack() as stack:  # close the others even after an error
            for file in reversed(self._all_files()):
                stack.callback(file.discard)
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def _all_files(self) -> list[AppendFile]:
        return [*self._files, *([self._index] if self._index else [])]

    def _beside(self, ending: str) -> Path:
        return self._prefix.with_name(self._prefix.name + ending)

    def _open(self, path: Path, resume: SyncPoint | None) -> AppendFile:
        file = AppendFile(path, resume)
        self._files.append(file)
        return file

    def _check_ids(self, tokens: NDArray[np.integer[Any]]) -> None:
        if not tokens.size or tokens.dtype == self._dtype:
            return
        smallest, largest = int(tokens.min()), int(tokens.max())
        # No model reads negative ids, but Megatron's null tokenizer writes them if they fit.
        low, high = int(np.iinfo(self._dtype.name).min), int(np.iinfo(self._dtype.name).max)
        if smallest < low or largest > high:
            raise BadInputError(
                f"{self._prefix}: a token id does not fit {self._dtype.name}",
                found=f"id {smallest if smallest < low else largest} after {counted(self._documents, 'document')}",
                expected=f"ids from {low} to {high}",
                fix="a tokenizer whose ids fit its vocabulary size, or a wider token type",
            )

    def _append_tokens(self, data: NDArray[Any]) -> None:
        """Write and hash the same bytes at the same time: both release the GIL."""
        if data.nbytes < _WORTH_A_THREAD:
            self._bin.append(data)
            self._scan(data)
            return
        scanning = self._thread.submit(self._scan, data)
        try:
            self._bin.append(data)
        finally:
            # The caller may reuse the memory afterwards.
            scanning.result()

    def _scan(self, data: NDArray[Any]) -> None:
        # The slower one first: it brings the bytes into the caches.
        self._hasher.update(raw_bytes(data))
        if data.size:
            largest = int(data.max())
            self._largest_id = largest if self._largest_id is None else max(self._largest_id, largest)

    def _write_index(self, index: AppendFile) -> str:
        """Write header, lengths, pointers and boundaries, in blocks; returns the hash of the file."""
        hasher = blake3.blake3()
        sections = (
            self._lengths.blocks(LENGTH_DTYPE),
            self._pointers(),
            self._boundaries.blocks(POINTER_DTYPE),
        )
        header = pack_header(self._dtype, num_sequences=self._sequences, num_documents=self._documents)
        hasher.update(header)
        index.append(header)
        for section in sections:
            for block in section:
                hasher.update(raw_bytes(block))
                index.append(block)
        return hasher.hexdigest()

    def _pointers(self) -> Iterator[NDArray[np.int64]]:
        start = 0
        for lengths in self._lengths.blocks(LENGTH_DTYPE):
            pointers, start = _core.pointers_from_lengths(lengths, self._dtype.itemsize, start)
            yield pointers

    def _rename(self, index: AppendFile) -> None:
        """Rename in an order that never leaves an .idx beside the wrong .bin."""
        folder = self._prefix.parent
        with os_errors_named(f"finishing {self._prefix}"):
            remove_synced(index.path)
            try:
                for file in (self._bin, index):
                    file.commit()
                    atomic_io.sync_folder(folder)
            except BaseException:
                index.path.unlink(missing_ok=True)
                self._bin.roll_back()
                raise


def _check_shapes(
    tokens: NDArray[np.integer[Any]],
    lengths: NDArray[np.integer[Any]],
    document_ends: NDArray[np.integer[Any]],
) -> None:
    """Check that a caller's three arrays agree."""
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
            found=counted(lengths[worst], "token"),
            expected=f"at most {LARGEST_LENGTH}",
            fix="split the document",
        )
