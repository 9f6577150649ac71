"""From what a user names (files, folders, patterns, "-") to a sorted list of readable files.

The order is that of the arguments, and inside a folder or pattern that of the sorted paths, never the file
system's. A folder gives the files of known endings below it (mdata/sources/folder_files.py); a file named outright may
have any name. How a file is packed, and whether it is parquet, its first bytes say; its
ending only tells plain text from lines of JSON.
"""

from __future__ import annotations

import fcntl
import glob
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from mdata.errors import UsageError, explain_os_error, few
from mdata.progress import SILENT, Progress
from mdata.sources.folder_files import Filter, LeftOut, files_below, is_result

Format = Literal["jsonl", "parquet", "text"]
Compression = Literal["none", "gzip", "zstd", "bzip2", "xz"]

STDIN = Path("-")
# Enough for every first mark below.
HEAD_BYTES = 8
_PACKED_ENDINGS = ("", ".gz", ".zst", ".bz2", ".xz")
_TEXT_NAMES = (".txt", ".text", ".md")
_PARQUET = b"PAR1"
_ALL = Filter()
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_FETCHED_BY = {
    "s3": "aws s3 sync (or s5cmd)",
    "gs": "gcloud storage rsync",
    "hf": "hf download",
    "az": "azcopy copy",
    "abfs": "azcopy copy",
    "abfss": "azcopy copy",
    "r2": "rclone copy",
    "http": "curl -LO",
    "https": "curl -LO",
    "hdfs": "hdfs dfs -get",
}
_NOT_READ_HERE = {
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\x04\x22\x4d\x18": "lz4 data",
    b"PARE": "encrypted parquet",
    b"ARROW1": "an Arrow file",
    b"Obj\x01": "an Avro file",
}


def _packed(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name + packed for packed in _PACKED_ENDINGS for name in names)


ENDINGS: dict[Format, tuple[str, ...]] = {
    "jsonl": _packed((".jsonl", ".json", ".jsonlines", ".ndjson")),
    "parquet": (".parquet",),
    "text": _packed(_TEXT_NAMES),
}


@dataclass(frozen=True)
class SourceFile:
    """One input file as it was when the work was planned; standard input is the path "-" without size and time."""

    path: Path
    size_bytes: int
    modified_ns: int
    format: Format = "jsonl"
    compression: Compression = "none"

    @property
    def streamed(self) -> bool:
        """It must be read in order by one reader; otherwise any piece can be read by itself."""
        return self.compression != "none" or self.format == "parquet" or self.path == STDIN


@dataclass(frozen=True)
class Inputs:
    """What was named: the files in the order in which they will be read, and what of folders is left out."""

    files: tuple[SourceFile, ...]
    left_out: LeftOut


def find_inputs(
    inputs: Sequence[str | Path],
    *,
    format: Literal["auto"] | Format = "auto",
    chosen: Filter = _ALL,
    progress: Progress = SILENT,
) -> Inputs:
    """The files that the arguments name, in the order in which they will be read.

    Args:
        inputs: files, folders and patterns; "-" is standard input.
        format: what every file holds; "auto" looks at first bytes and endings.
        chosen: what of folders is taken.
        progress: hears what is left out.

    Raises:
        UsageError: a path that cannot be read, a pattern without a match, a file named twice, data of another
            format.
    """
    if isinstance(inputs, str):
        raise UsageError(f"input={inputs!r} is one string", expected="a sequence of files, folders and patterns")
    if any(not str(name) for name in inputs):
        raise UsageError("an input has no name", found="''", fix="give files, folders or patterns")
    if not inputs:
        raise UsageError("no input is named", fix="give files, folders or patterns of .jsonl or .jsonl.gz")
    if format not in ("auto", *get_args(Format)):
        raise UsageError(f"input format {format!r}", expected="auto, jsonl, parquet or text")
    if chosen and not any(Path(name).is_dir() for name in inputs):
        raise UsageError(
            "--include and --exclude choose files of a folder", found=f"no folder among {few(list(map(str, inputs)))}"
        )
    found: dict[Path, SourceFile] = {}
    left_out = LeftOut()
    for name in inputs:
        for path in _expand(str(name), format, chosen, left_out):
            real = path if path == STDIN else path.resolve()
            if real in found:
                raise UsageError(f"{path} is named twice in the input", fix="name each file once")
            found[real] = _look_at(path, format)
    if left_out.counts:
        progress.note(f"left out of the input: {left_out}")
    if chosen.exclude and "excluded" not in left_out.counts:
        progress.note(f"nothing in the input fits --exclude {' '.join(chosen.exclude)}")
    return Inputs(tuple(found.values()), left_out)


def find_files(inputs: Sequence[str | Path], *, format: Literal["auto"] | Format = "auto") -> list[SourceFile]:
    """The files of `find_inputs`."""
    return list(find_inputs(inputs, format=format).files)


def refuse_remote(name: str) -> None:
    """Refuse what names no file of this machine.

    Raises:
        UsageError: an address; says how its content is fetched.
    """
    scheme = _ADDRESS.match(name)
    if scheme is None:
        return
    if scheme[1].lower() == "file":
        raise UsageError(f"{name} is an address", expected="a path", fix=name[len(scheme[0]) :] or "/")
    how = _FETCHED_BY.get(scheme[1].lower(), "the tool of that store")
    raise UsageError(
        f"{name}: object storage and addresses are not read yet", expected="a path", fix=f"copy it first, with {how}"
    )


def _expand(name: str, format: Literal["auto"] | Format, chosen: Filter, left_out: LeftOut) -> Iterator[Path]:
    path = Path(name)
    if path == STDIN and name == "-":
        yield STDIN
    elif path.is_dir():
        yield from _of_folder(name, format, chosen, left_out)
    elif path.exists() or not glob.has_magic(name):
        refuse_remote(name)
        yield path
    else:
        refuse_remote(name)
        matches = sorted(m for m in glob.glob(name, recursive=True) if not Path(m).is_dir())  # noqa: PTH207
        for match in matches:
            if is_result(Path(match)):
                left_out.add("result of ours", match)
        taken = [match for match in matches if not is_result(Path(match))]
        if not taken:
            found = f"only {left_out}" if matches else None
            raise UsageError(
                f"{name}: no file fits this pattern", found=found, fix="check the folder; quote the pattern"
            )
        yield from map(Path, taken)


def _of_folder(name: str, format: Literal["auto"] | Format, chosen: Filter, left_out: LeftOut) -> list[Path]:
    known = tuple(ending for endings in ENDINGS.values() for ending in endings)
    endings = known if format == "auto" else ENDINGS[format]
    here = LeftOut()
    found = files_below(Path(name), endings, known=known, chosen=chosen, left_out=here)
    if not found:
        plain = [ending for ending in endings if not ending.endswith(_PACKED_ENDINGS[1:])]
        packed = f"; but for .parquet also {', '.join(_PACKED_ENDINGS[1:])} behind it"
        raise UsageError(
            f"{name}: no input in this folder",
            found=str(here) or None,
            expected="files that fit --include and not --exclude"
            if chosen
            else f"files named *{', *'.join(plain)}" + packed * (len(plain) < len(endings)),
        )
    left_out.join(here)
    return found


def _look_at(path: Path, format: Literal["auto"] | Format) -> SourceFile:
    if path == STDIN:
        if format == "parquet":
            raise UsageError("parquet cannot be read from standard input", fix="name the file")
        _check_stdin()
        return SourceFile(STDIN, 0, 0, "jsonl" if format == "auto" else format)
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise UsageError(f"{path} is not a regular file", fix="write the text to a file first, or pipe it to -")
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise explain_os_error(error, "reading the input") from error
    refuse_foreign(path, head)
    return SourceFile(
        path, facts.st_size, facts.st_mtime_ns, _format_of(path, head, asked=format), compression_of(head)
    )


def _check_stdin() -> None:
    """Refuse a standard input that nobody gave: `<&-`, which would look like an empty one."""
    try:
        is_open = fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
    except OSError:
        is_open = False
    if not is_open:
        raise UsageError("standard input is closed", expected="text on it, as the input is -", fix="name files")


def compression_of(head: bytes) -> Compression:
    """How data that begins with `head` is packed."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    # A zstd file may begin with a skippable frame, whose first byte is 0x50 to 0x5f.
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F):
        return "zstd"
    if head.startswith(b"BZh") and head[4:6] in (b"1A", b"\x17r"):
        return "bzip2"
    return "xz" if head.startswith(b"\xfd7zXZ\0") else "none"


def refuse_foreign(path: Path, head: bytes) -> None:
    """Name containers that nothing here reads.

    Raises:
        UsageError: the data begins as one of them does.
    """
    for magic, kind in _NOT_READ_HERE.items():
        if head.startswith(magic):
            expected = "text, lines of JSON or parquet, plain or packed by gzip, zstd, bzip2 or xz"
            raise UsageError(f"{path} holds {kind}, which is not read", expected=expected)


def _format_of(path: Path, head: bytes, *, asked: Literal["auto"] | Format) -> Format:
    is_parquet = head.startswith(_PARQUET)
    if asked == "auto":
        return "parquet" if is_parquet else "text" if path.name.lower().endswith(ENDINGS["text"]) else "jsonl"
    if is_parquet != (asked == "parquet"):
        holds = "parquet data" if is_parquet else "no parquet data"
        raise UsageError(f"{path} holds {holds}, and the format asked for is {asked}", fix="leave the format out")
    return asked


def check_unchanged(file: SourceFile) -> None:
    """Refuse a file that was written to while we read it; standard input cannot be asked.

    Raises:
        UsageError: its size or time of change differs from the plan's.
    """
    if file.path == STDIN:
        return
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
