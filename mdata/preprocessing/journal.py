"""The journal of a run: records that are synced to disk before anything depends on them.

One record per line: 16 hex digits of BLAKE3 of the rest, a blank, JSON. A line that a crash truncated or that is not a
record is ignored, and so is everything after it. The first record describes the job; each "state" record follows an
fsync of all temporary files and has their sizes and digests of their ends; a "placing" record names the files that are
about to get their final names (placing.py); "given up" means that files are being removed and nothing can be continued.
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
    """An append-only file of JSON records. The caller holds the run's lock.

    Attributes:
        records: those in the file when it was opened.
        resumable: whether a run can be continued from it; set by the code that records a state.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with os_errors_named(f"opening {path}"):
            fresh = not path.exists()
            self.records, size = read_records(path)
            self.resumable = bool(self.records)
            self._open = atomic_io.Descriptor(atomic_io.open_no_link(path, os.O_WRONLY | os.O_CREAT))
            try:
                self._cut(size)
                if fresh:
                    atomic_io.sync_folder(path.parent)
            except BaseException:
                self.close(keep=not fresh)
                raise

    def append(self, record: dict[str, Any]) -> None:
        """Write a record; it is synced to disk when this returns.

        Raises:
            ResourceError: the disk is full, or another error of the file system.
        """
        line = _line(record)
        try:
            with os_errors_named(f"writing {self.path}"):
                atomic_io.write_all(self._open.fd, line)
                atomic_io.sync(self._open.fd)
        except BaseException:
            # Half a line would hide all later ones.
            self._cut(self._size)
            raise
        self._size += len(line)

    def restart(self) -> None:
        """Remove every record."""
        self.records = []
        self.resumable = False
        self._cut(0)

    def close(self, *, keep: bool = True) -> None:
        """Stop writing; the file is kept, or removed."""
        self._open.close()
        if not keep:
            with suppress(OSError):
                self.path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the file: the run it described is finished or discarded."""
        with os_errors_named(f"removing {self.path}"):
            # Temporary files that were removed must not reappear after a power loss without a journal.
            atomic_io.sync_folder(self.path.parent)
            self.path.unlink(missing_ok=True)
            atomic_io.sync_folder(self.path.parent)

    def _cut(self, size: int) -> None:
        os.ftruncate(self._open.fd, size)
        os.lseek(self._open.fd, size, os.SEEK_SET)
        self._size = size


def first_record(path: Path) -> dict[str, Any] | None:
    """The first record of a journal, which describes its job; None if the file is not a journal or cannot be read."""
    try:
        with path.open("rb") as file:
            return _record(file.readline())
    except OSError:
        return None


def _line(record: dict[str, Any]) -> bytes:
    text = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    return blake3(text).hexdigest()[:_DIGITS].encode() + b" " + text + b"\n"


def read_records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The records up to the first line that is not one, and their size in bytes."""
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
    """All bytes of the file; none if there is no file."""
    try:
        fd = atomic_io.open_no_link(path, os.O_RDONLY)
    except FileNotFoundError:
        return b""
    with os.fdopen(fd, "rb") as file:
        return file.read()


def _record(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None if the line is truncated or is not a record."""
    digest, _, text = line[:-1].partition(b" ")
    if not line.endswith(b"\n") or blake3(text).hexdigest()[:_DIGITS].encode() != digest:
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("kind"), str) else None
