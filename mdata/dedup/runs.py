"""Sorted runs of records in files, read by range and merged in bounded memory; see mdata_cpp/record_runs.hpp."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mdata import _core
from mdata.errors import DamageError, os_errors_named
from mdata.util import atomic_io

MOST_RUNS = 512  # merged at a time: each is an open file
BUFFERS_BYTES = 32 << 20  # of a merge
SORTED_RECORDS = 1 << 21  # sorted in memory at a time

Records = npt.NDArray[np.uint64]


class _RunSlice(NamedTuple):
    """A range of records in an open file, as `_core` takes it.

    Args:
        file: a descriptor. offset: byte of the first record. records: their number. added: to document numbers.
    """

    file: int
    offset: int
    records: int
    added: int


@dataclass(frozen=True)
class SortedRun:
    """Sorted records in a file: byte of the first, number, and what is added to document numbers.

    `repair` says what to do if the file is damaged; None: its job's folder in `.work` is made again.
    """

    path: Path
    offset: int
    count: int
    added: int = 0
    repair: str | None = None


@contextmanager
def damage_named(runs: Sequence[SortedRun], words: int) -> Iterator[None]:
    """Name the file that is damaged.

    Raises:
        DamageError: a file is shorter than it was, or not sorted.
    """
    try:
        yield
    except ValueError as error:
        # A merge does not know from which run a record comes, so all runs are read again, one by one.
        run, found = next(((run, found) for run in runs if (found := _damage(run, words))), (runs[0], str(error)))
        fix = run.repair or f"remove {run.path.parent.parent}, and run the same command again"
        raise DamageError(f"{run.path} is damaged", found=found, fix=fix) from error


def _damage(run: SortedRun, words: int) -> str | None:
    """The problem of a run; None if it is intact."""
    with _opened(run.path) as file:
        size, end = os.fstat(file).st_size, run.offset + 8 * words * run.count
        if size < end:
            return f"{size} bytes instead of {end} or more"
        merger = _core.RunMerger([_RunSlice(file, run.offset, run.count, 0)], words, 1 << 20)
        try:
            while len(merger.records(SORTED_RECORDS // 8)):
                pass
        except ValueError:
            return "records that are not sorted"
    return None


class Merger:
    """A `_core.RunMerger` that names the damaged file.

    Raises:
        DamageError: in both calls, see `damage_named`.
    """

    def __init__(self, merger: _core.RunMerger, runs: Sequence[SortedRun], words: int) -> None:
        self._merger, self._runs, self._words = merger, runs, words

    def records(self, limit: int) -> Records:
        """The next records; none at the end."""
        with damage_named(self._runs, self._words):
            return self._merger.records(limit)

    def edges(self, limit: int, *, chain: bool) -> Records:
        """The next pairs of documents with equal keys; none at the end."""
        with damage_named(self._runs, self._words):
            return self._merger.edges(limit, chain)


@contextmanager
def merged(
    runs: Sequence[SortedRun], words: int, *, scratch: Path, low: int = 0, high: int = 1 << 64
) -> Iterator[Merger]:
    """The records whose first word is in [low, high), in order.

    If there are more runs than may be open, they are merged in rounds into files named after `scratch`, which are
    removed at the end.
    """
    with ExitStack() as stack:
        while len(runs) > MOST_RUNS:
            groups = [runs[start : start + MOST_RUNS] for start in range(0, len(runs), MOST_RUNS)]
            names = [f".{scratch.name}.{len(runs)}-{place}.merged" for place in range(len(groups))]
            paths = [scratch.with_name(name) for name in names]
            for path in paths:
                stack.callback(path.unlink, missing_ok=True)
            runs = [
                write_merged(group, words, path, low=low, high=high) for group, path in zip(groups, paths, strict=True)
            ]
        files = {path: stack.enter_context(_opened(path)) for path in {run.path for run in runs}}
        with damage_named(runs, words):
            slices = [_slice(files[run.path], run, words, low=low, high=high) for run in runs]
            slices = [part for part in slices if part.records]
            merger = _core.RunMerger(slices, words, min(BUFFERS_BYTES // max(1, len(slices)), 1 << 20))
        yield Merger(merger, runs, words)


def _slice(file: int, run: SortedRun, words: int, *, low: int, high: int) -> _RunSlice:
    """The records of a run whose first word is in [low, high)."""
    whole = _RunSlice(file, run.offset, run.count, run.added)
    first = _core.count_below(whole, words, low) if low else 0
    last = _core.count_below(whole, words, high) if high < 1 << 64 else run.count
    return whole._replace(offset=run.offset + 8 * words * first, records=last - first)


def write_merged(runs: Sequence[SortedRun], words: int, path: Path, *, low: int = 0, high: int = 1 << 64) -> SortedRun:
    """Merge several runs into one file."""
    count = 0
    with merged(runs, words, scratch=path, low=low, high=high) as merger, atomic_io.atomic_file(path) as fd:
        while len(records := merger.records(SORTED_RECORDS // 8)):
            atomic_io.write_all(fd, records.data)
            count += len(records)
    return SortedRun(path, 0, count)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    with os_errors_named("reading sorted runs"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def check_size(path: Path, expected: int) -> None:
    """Check that a file is as long as its done-file says.

    Raises:
        DamageError: it has another size, or is missing.
    """
    size = path.stat().st_size if path.is_file() else None
    if size != expected:
        raise DamageError(
            f"{path} is torn" if size is not None else f"{path} is missing",
            found=None if size is None else f"{size} bytes",
            expected=f"{expected} bytes, as its done-file says",
            fix=f"remove {path.parent.parent}, and run the same command again",
        )


class SortedWriter:
    """Records in any order, written as one sorted run.

    Args:
        path: of the run; its folder exists. words: of a record.
    """

    def __init__(self, path: Path, words: int) -> None:
        self._path, self._words = path, words
        self._waiting: list[Records] = []
        self._count = 0
        self._runs: list[SortedRun] = []

    def add(self, records: Records) -> None:
        """Take records."""
        self._waiting.append(records)
        self._count += len(records)
        if self._count >= SORTED_RECORDS:
            path = self._path.with_name(f".{self._path.name}.{len(self._runs)}.sorted")
            self._runs.append(self._write(path))

    def finish(self) -> SortedRun:
        """Write what is left; the run."""
        if not self._runs:
            return self._write(self._path)
        self._runs.append(self._write(self._path.with_name(f".{self._path.name}.last.sorted")))
        run = write_merged(self._runs, self._words, self._path)
        for part in self._runs:
            part.path.unlink(missing_ok=True)
        return run

    def _write(self, path: Path) -> SortedRun:
        records = np.concatenate([np.empty((0, self._words), np.uint64), *self._waiting])
        self._waiting, self._count = [], 0
        _core.sort_records(records)
        atomic_io.atomic_write(path, records.data)
        return SortedRun(path, 0, len(records))


def with_offsets(path: Path, counts: Sequence[int], words: Callable[[int], int]) -> list[SortedRun]:
    """The runs that follow one another in a file; `words`: the length of a record of run i, in words."""
    runs, offset = [], 0
    for place, count in enumerate(counts):
        runs.append(SortedRun(path, offset, count))
        offset += 8 * words(place) * count
    return runs
