"""From what a user names (files, folders, patterns) to a sorted list of readable files.

The order is that of the arguments, and inside a folder or pattern that of the sorted paths, never the file
system's. A folder gives the files of known endings below it; a file named outright may have any name. What
a file is, its first bytes say: gzip data is unpacked whatever its name.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mdata.errors import UsageError, explain_os_error, os_errors_named

ENDINGS = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_GZIP = b"\x1f\x8b"
_NOT_READ_HERE = {b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"PAR1": "parquet"}


@dataclass(frozen=True)
class SourceFile:
    """One input file as it was when the work was planned."""

    path: Path
    size_bytes: int
    modified_ns: int
    compression: Literal["none", "gzip"]


def find_files(inputs: Sequence[str | Path]) -> list[SourceFile]:
    """The files that the arguments name, in the order in which they will be read.

    Raises:
        UsageError: a path that cannot be read, a pattern without a match, a file named twice.
    """
    if not inputs:
        raise UsageError("no input is named", fix="give files, folders or patterns of .jsonl or .jsonl.gz")
    found: dict[Path, SourceFile] = {}
    for name in inputs:
        for path in _expand(str(name)):
            real = path.resolve()
            if real in found:
                raise UsageError(f"{path} is named twice in the input", fix="name each file once")
            found[real] = _look_at(path)
    return list(found.values())


def _files_below(folder: Path) -> Iterator[Path]:
    """Every file below a folder; one that cannot be listed is an error, never skipped."""

    def refuse(error: OSError) -> None:
        raise error

    with os_errors_named("reading the input"):
        for root, _, names in os.walk(folder, onerror=refuse):
            yield from (Path(root, name) for name in names)


def _expand(name: str) -> Iterator[Path]:
    path = Path(name)
    if path.is_dir():
        inside = sorted(p for p in _files_below(path) if p.name.endswith(ENDINGS) and p.is_file())
        if not inside:
            raise UsageError(f"{name}: no input in this folder", expected=f"files named *{', *'.join(ENDINGS)}")
        yield from inside
    elif path.exists() or not glob.has_magic(name):
        yield path
    else:
        matches = sorted(m for m in glob.glob(name, recursive=True) if not Path(m).is_dir())  # noqa: PTH207
        if not matches:
            raise UsageError(f"{name}: no file fits this pattern", fix="check the folder; quote the pattern")
        yield from map(Path, matches)


def _look_at(path: Path) -> SourceFile:
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise UsageError(f"{path} is not a regular file", fix="write the text to a file first")
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise explain_os_error(error, "reading the input") from error
    for magic, kind in _NOT_READ_HERE.items():
        if head.startswith(magic):
            what = f"{path} holds {kind} data, which this version does not read"
            raise UsageError(what, expected="plain or gzip-compressed lines of JSON")
    compression: Literal["none", "gzip"] = "gzip" if head.startswith(_GZIP) else "none"
    return SourceFile(path, facts.st_size, facts.st_mtime_ns, compression)


def check_unchanged(file: SourceFile) -> None:
    """Refuse a file that was written to while we read it.

    Raises:
        UsageError: its size or time of change differs from the plan's.
    """
    try:
        now = file.path.stat()
    except OSError as error:
        raise explain_os_error(error, "reading the input") from error
    if (now.st_size, now.st_mtime_ns) != (file.size_bytes, file.modified_ns):
        raise UsageError(
            f"{file.path} was changed while it was read",
            found=f"{now.st_size} bytes",
            expected=f"{file.size_bytes} bytes, unchanged",
            fix="let the program that writes it finish first",
        )
