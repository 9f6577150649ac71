"""Where each document came from: a sidecar `<prefix>.origins` with file and row, as runs.

Documents are written in the order of the input, so their rows mostly count up. A run records its first document, the
file (its number in the manifest's inputs) and the row (from 1); each further document of the run lies `step` rows on.
All runs of a file share one step: 1, or P for a part that takes every P-th row. docs/reference/formats.md,
"Origins", describes every byte.
"""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import NamedTuple

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mdata.errors import DamageError, UsageError, os_errors_named
from mdata.indexed.append_file import AppendFile, SyncPoint
from mdata.indexed.mapped_files import hash_file

MAGIC = b"MDORIGIN"
VERSION = 1
HEADER_BYTES = 24
RUN_BYTES = 24
_RUNS_AT_ONCE = 1 << 16


class OriginsState(NamedTuple):
    """The position of a writer: bytes and documents written, and the file and row that would continue the last run.

    `sync_point`: of the file; only in a state that `checkpoint` returned.
    """

    size: int
    documents: int
    file: int
    next_row: int
    sync_point: SyncPoint | None = None


_FRESH = OriginsState(0, 0, -1, 0)


class OriginsWriter:
    """Writes the origins of documents, in the order of the documents.

    Args:
        path: the final name.
        step: rows between two documents of a run.
        resume: state from which to continue an earlier writer's file.
    """

    def __init__(self, path: Path, step: int, *, resume: OriginsState | None = None) -> None:
        state = resume or _FRESH
        self._step = step
        self._documents, self._file, self._next_row = state[1:4]
        assert resume is None or state.sync_point, "a state to continue from comes from a checkpoint"
        self._sidecar = AppendFile(path, SyncPoint(*state.sync_point) if state.sync_point else None)
        if resume is None:
            try:
                self._sidecar.append(MAGIC + np.array([VERSION, step], "<i8").tobytes())
            except BaseException:
                self._sidecar.discard()
                raise

    @property
    def state(self) -> OriginsState:
        """The position of this writer."""
        return OriginsState(self._sidecar.size, self._documents, self._file, self._next_row)

    def append(self, file: int | NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        """Add documents: their rows, int64[n], and the file of all or of each."""
        if not len(rows):
            return
        files = np.broadcast_to(np.asarray(file, np.int64), rows.shape)
        expected = np.concatenate(([self._next_row], rows[:-1] + self._step))
        before = np.concatenate(([self._file], files[:-1]))
        starts = np.flatnonzero((rows != expected) | (files != before))
        if len(starts):
            documents = self._documents + starts
            self._sidecar.append(np.column_stack((documents, files[starts], rows[starts])).astype("<i8"))
        self._documents += len(rows)
        self._file, self._next_row = int(files[-1]), int(rows[-1]) + self._step

    def append_runs(self, runs: NDArray[np.int64], documents: int) -> None:
        """Add documents of another sidecar with the same step, by its runs, int64[n, 3]; adjacent runs are joined."""
        if not len(runs):
            return
        further_on = np.array([self._documents, 0, 0])
        goes_on = (self._file, self._next_row) == (int(runs[0, 1]), int(runs[0, 2]))
        for first in range(int(goes_on), len(runs), _RUNS_AT_ONCE):
            self._sidecar.append((runs[first : first + _RUNS_AT_ONCE] + further_on).astype("<i8"))
        first_of_last, self._file, row = (int(value) for value in runs[-1])
        self._next_row = row + (documents - first_of_last) * self._step
        self._documents += documents

    def checkpoint(self) -> OriginsState:
        """Sync everything appended; a writer made with this state as `resume` continues from here."""
        return self.state._replace(sync_point=self._sidecar.sync())

    def stage(self) -> str:
        """Sync the file, still under its temporary name; returns its hash (BLAKE3, hex)."""
        self._sidecar.sync()
        self._sidecar.check_name()
        hasher = blake3()
        for block in self._sidecar.blocks(np.dtype(np.uint8)):
            hasher.update(block.data)
        return hasher.hexdigest()

    def commit(self) -> str:
        """Sync the file and give it its final name; returns its hash."""
        digest = self.stage()
        self._sidecar.commit()
        return digest

    def rest(self) -> None:
        """Close the file until it is used again; see `AppendFile.rest`."""
        self._sidecar.rest()

    def close(self) -> None:
        """Stop writing; an uncommitted file stays for a writer that resumes."""
        self._sidecar.close()

    def discard(self) -> None:
        """Stop writing; an uncommitted file is removed."""
        self._sidecar.discard()


class OriginsTable:
    """The content of a sidecar; see `open_origins`.

    Attributes:
        step: rows between two documents of a run.
        runs: int64[n, 3], (first document, file, row of the first document) of each run.
    """

    def __init__(self, path: Path, step: int, *, runs: NDArray[np.int64]) -> None:
        self.path = path
        self.step = step
        self.runs = runs

    def of_document(self, number: int) -> tuple[int, int]:
        """The file (number in the manifest's inputs) and row (from 1) of document `number`.

        Raises:
            DamageError: the sidecar has no document.
        """
        run = bisect_right(self.runs[:, 0], number) - 1  # numpy's own search would copy the column each time
        if run < 0:
            raise DamageError(f"{self.path} is truncated: it has no origin for document {number}")
        first, file, row = (int(value) for value in self.runs[run])
        return file, row + (number - first) * self.step

    def of_documents(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`of_document` of many: int64[n] files and rows.

        Raises:
            DamageError: the sidecar has no document.
        """
        if not len(self.runs) and len(numbers):
            raise DamageError(f"{self.path} is truncated: it has no origin for document {numbers[0]}")
        runs = np.array(self.runs[np.searchsorted(self.runs[:, 0], numbers, side="right") - 1])
        return runs[:, 1], runs[:, 2] + (numbers - runs[:, 0]) * self.step

    def documents_of(self, file: int, row: int) -> list[int]:
        """The documents that a row became: none or one, unless a file was read in several passes."""
        ends = np.append(self.runs[1:, 0], np.iinfo(np.int64).max)
        first, of_file, first_row = self.runs.T
        ahead = row - first_row
        further = ahead // self.step
        # Compared, not added: in an altered file the sum can overflow.
        hits = (of_file == file) & (ahead >= 0) & (ahead % self.step == 0) & (further < ends - first)
        return [int(number) for number in (first + further)[hits]]


def open_origins(path: Path) -> OriginsTable:
    """Read a sidecar.

    The length of the last run is not stored: `documents_of` may name a document past the corpus' last.

    Raises:
        UsageError: it cannot be read.
        DamageError: not an origins file, truncated, or its runs do not increase.
    """
    with os_errors_named("reading origins"):
        size = path.stat().st_size
        # Mapped, not read: it may be larger than memory.
        data = np.memmap(path, np.uint8, "r") if size >= HEADER_BYTES else np.empty(0, np.uint8)
    if data[:8].tobytes() != MAGIC:
        raise DamageError(f"{path} is not an origins sidecar", expected=f"a file that begins with {MAGIC.decode()}")
    version, step = (int(value) for value in data[8:HEADER_BYTES].view("<i8"))
    if version != VERSION:
        raise UsageError(f"{path}: unknown format version", found=str(version), expected=str(VERSION))
    body = data[HEADER_BYTES:]
    if step < 1 or len(body) % RUN_BYTES:
        raise DamageError(f"{path} is truncated or altered", found=f"step {step}, {len(body)} bytes of runs")
    runs = body.view("<i8").reshape(-1, 3)
    if not _in_order(runs):
        raise DamageError(f"{path} is altered: its runs do not start at document 0 and increase")
    return OriginsTable(path, step, runs=runs)


def check_origins(path: Path, recorded: str) -> None:
    """Check that a sidecar has the hash its manifest records: of altered rows nothing else tells.

    Raises:
        UsageError, ResourceError: it cannot be read. DamageError: it has another hash.
    """
    with os_errors_named("reading origins"):
        computed = hash_file(path)
    if computed != recorded:
        raise DamageError(
            f"{path}: its content was changed",
            found=computed,
            expected=recorded,
            fix="copy it again from where it is intact, or make the corpus again",
        )


def _in_order(runs: NDArray[np.int64]) -> bool:
    """Whether documents start at 0 and increase, and files and rows are in range; checked in bounded blocks."""
    if len(runs) and runs[0, 0] != 0:
        return False
    for first in range(0, len(runs), _RUNS_AT_ONCE):
        some = runs[first : first + _RUNS_AT_ONCE + 1]
        # Compared, not subtracted: a difference of altered numbers can overflow.
        if (some[1:, 0] <= some[:-1, 0]).any() or (some[:, 1:] < [0, 1]).any():
            return False
    return True
