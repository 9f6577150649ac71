"""The journal of a run: records that are surely on the device before anything is built on them.

One line a record: 16 hex digits of BLAKE3 of the rest, a blank, JSON. A line that was cut by a crash or that is no
record, and all after it, does not count. The first record says which job this is; each "state" record follows an fsync
of all files in the making and says how far they go and how they end there; a "placing" record names the files that
are about to get final names; "given up" means that they are being removed, and that nothing is continued.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from mdata.errors import os_errors_named
from mdata.util import atomic_io

_DIGITS = 16


class Journal:
    """An append-only file of JSON records; who opens it holds the run's lock.

    Args:
        path: the file; made where it is not there.

    Attributes:
        records: what it held when it was opened.
        worth_keeping: whether a run could be continued from it; who records a state sets it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with os_errors_named(f"opening {path}"):
            fresh = not path.exists()
            self.records, size = _read(path)
            self.worth_keeping = bool(self.records)
            self._open = atomic_io.Descriptor(atomic_io.open_no_link(path, os.O_WRONLY | os.O_CREAT))
            try:
                self._cut(size)
                if fresh:
                    atomic_io.sync_folder(path.parent)
            except BaseException:
                self.close(keep=not fresh)
                raise

    def append(self, record: dict[str, Any]) -> None:
        """Write a record; when this returns it is on the device.

        Raises:
            ResourceError: the disk is full, or another fault of the file system.
        """
        line = _line(record)
        try:
            with os_errors_named(f"writing {self.path}"):
                atomic_io.write_all(self._open.fd, line)
                atomic_io.sync(self._open.fd)
        except BaseException:
            # Half a line would hide every later one.
            self._cut(self._size)
            raise
        self._size += len(line)

    def restart(self) -> None:
        """Forget every record."""
        self.records = []
        self.worth_keeping = False
        self._cut(0)

    def close(self, *, keep: bool = True) -> None:
        """Stop writing; the file stays, or goes because nothing could be continued from it."""
        self._open.close()
        if not keep:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Take the file away, for good: what it spoke of is finished, or gone."""
        with os_errors_named(f"removing {self.path}"):
            # The files in the making that were removed do not come back when nothing speaks of them any more.
            atomic_io.sync_folder(self.path.parent)
            self.path.unlink(missing_ok=True)
            atomic_io.sync_folder(self.path.parent)

    def _cut(self, size: int) -> None:
        os.ftruncate(self._open.fd, size)
        os.lseek(self._open.fd, size, os.SEEK_SET)
        self._size = size


def read_records(path: Path) -> list[dict[str, Any]]:
    """What a journal that somebody else may be writing holds."""
    with os_errors_named(f"reading {path}"):
        return _read(path)[0]


def first_record(path: Path) -> dict[str, Any] | None:
    """The job that a journal is of; None for a file that is no journal, or that may not be read."""
    try:
        with path.open("rb") as file:
            return _record(file.readline())
    except OSError:
        return None


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    return blake3(text).hexdigest()[:_DIGITS].encode() + b" " + text + b"\n"


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The records up to the first line that is not whole, and their size in bytes."""
    records: list[dict[str, Any]] = []
    size = 0
    for line in _content(path).splitlines(keepends=True):
        record = _record(line)
        if record is None:
            break
        records.append(record)
        size += len(line)
    return records, size


def _content(path: Path) -> bytes:
    """All bytes of the file; none where there is none."""
    try:
        fd = atomic_io.open_no_link(path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    with os.fdopen(fd, "rb") as file:
        return file.read()


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None for a line that is not whole, or that nobody wrote here."""
    digest, _, text = line[:-1].partition(b" ")
    if not line.endswith(b"\n") or blake3(text).hexdigest()[:_DIGITS].encode() != digest:
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None
