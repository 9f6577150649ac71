"""From the files, folders and patterns that a user names ("-" is standard input) to a list of readable files.

The order is that of the arguments, and inside a folder or pattern that of the sorted paths, never that of the file
system. A folder means the files with known endings below it (mdata/sources/folder_files.py); a file named explicitly
may have any name. The first bytes decide the compression and whether it is parquet; the ending only separates plain
text from lines of JSON.
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
from typing import Literal, NamedTuple

from mdata.errors import UsageError, explain_os_error, few
from mdata.object_storage.address import Address, address_of, is_address, neither
from mdata.object_storage.facts import ObjectFacts
from mdata.progress import SILENT, Progress
from mdata.sources.folder_files import PathFilter, SkippedFiles, files_below, is_result
from mdata.sources.saved_datasets import without_metadata
from mdata.util.regular_files import modified_ns, refuse_wide_encoding

Format = Literal["jsonl", "csv", "tsv", "parquet", "arrow", "warc", "tar", "text", "mediawiki", "html"]
TEXT_FORMATS: tuple[Format, ...] = ("jsonl", "csv", "tsv", "parquet", "arrow", "warc", "tar", "text")
"""Those that `preprocess` reads; a page of HTML or MediaWiki becomes text by `extract` first."""
Compression = Literal["none", "gzip", "zstd", "bzip2", "xz"]

STDIN = Path("-")
# Enough for every magic number below, and for that of a tar archive.
HEAD_BYTES = 512
_TAR, _TAR_AT = b"ustar", 257
# Texts do not contain these; every format with a magic number but WARC has some of them in its first bytes.
_CONTROL = re.compile(rb"[\0-\x08\x0e-\x1f]")
_FIRST_LINE_OF_WARC = re.compile(rb"WARC/[0-9.]+\r?\n")
_PAGE_RANGE = re.compile(r"\.xml-p\d+p\d+(?=\.|$)")
_BZIP2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
_ENDING_OF: dict[Compression, str] = {"none": "", "gzip": ".gz", "zstd": ".zst", "bzip2": ".bz2", "xz": ".xz"}
_COMPRESSED_ENDINGS = tuple(_ENDING_OF.values())
ARROW_FILE = b"ARROW1"
# A format is recognized by the first bytes; an Arrow stream by the marker of its first message.
_MAGIC: dict[bytes, Format] = {b"PAR1": "parquet", ARROW_FILE: "arrow", b"\xff\xff\xff\xff": "arrow", b"WARC/": "warc"}
# Read row by row, never as lines; --input-format is needed if they have no magic number.
_BINARY: tuple[Format, ...] = ("parquet", "arrow")
_ALL = PathFilter()
_UNSUPPORTED = {
    b"PK\x03\x04": "a zip archive",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\x04\x22\x4d\x18": "lz4 data",
    b"PARE": "encrypted parquet",
    b"FEA1": "a Feather file of version 1 (pyarrow.feather.write_feather writes version 2)",
    b"Obj\x01": "an Avro file",
}


def _compressed(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name + ending for ending in _COMPRESSED_ENDINGS for name in names)


ENDINGS: dict[Format, tuple[str, ...]] = {
    "jsonl": _compressed((".jsonl", ".json", ".jsonlines", ".ndjson")),
    "csv": _compressed((".csv",)),
    "tsv": _compressed((".tsv",)),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
    "warc": _compressed((".warc", ".wet")),
    "tar": (*_compressed((".tar",)), ".tgz"),
    "text": _compressed((".txt", ".text", ".md")),
    "mediawiki": _compressed((".xml",)),
    "html": _compressed((".html", ".htm", ".xhtml")),
}


class Section(NamedTuple):
    """The section of a file that a part reads: bytes [start, stop) of `total`, or row groups; `disk_bytes` on disk."""

    start: int
    stop: int
    total: int
    disk_bytes: int


@dataclass(frozen=True)
class SourceFile:
    """One input file as it was when the work was planned; standard input is the path "-" without size and time.

    A file in object storage has an address instead of a path, and the object's version.
    """

    path: Path | Address
    size_bytes: int
    modified_ns: int
    format: Format = "jsonl"
    compression: Compression = "none"
    section: Section | None = None
    etag: str | None = None

    @property
    def as_object(self) -> ObjectFacts | None:
        """The object, if it is one."""
        if isinstance(self.path, Path):
            return None
        return ObjectFacts(self.path, self.size_bytes, self.modified_ns, self.etag)

    @property
    def disk_bytes(self) -> int:
        """How many bytes of the file are read."""
        return self.section.disk_bytes if self.section else self.size_bytes

    @property
    def streamed(self) -> bool:
        """Whether it must be read in order by one reader; any chunk of other files can be read separately."""
        local = isinstance(self.path, Path) and self.path != STDIN
        return self.compression != "none" or self.format not in ("jsonl", "text", "html") or not local


@dataclass(frozen=True)
class Inputs:
    """The files in the order in which they will be read, and what was skipped in folders."""

    files: tuple[SourceFile, ...]
    skipped: SkippedFiles


def find_inputs(
    inputs: Sequence[str | Path],
    *,
    format: Literal["auto"] | Format = "auto",
    filter: PathFilter = _ALL,
    progress: Progress = SILENT,
    formats: tuple[Format, ...] = TEXT_FORMATS,
) -> Inputs:
    """The files that the arguments name, in the order in which they will be read.

    Args:
        inputs: files, folders and patterns; "-" is standard input.
        format: of every file; "auto" decides by first bytes and endings.
        filter: which files of folders are read.
        progress: receives a note on each skipped file.
        formats: those that are read here.

    Raises:
        UsageError: an unreadable path, a pattern without a match, a file named twice, data in another format.
    """
    if isinstance(inputs, str):
        raise UsageError(f"input={inputs!r} is one string", expected="a sequence of files, folders and patterns")
    if any(not str(name) for name in inputs):
        raise UsageError("an input has no name", found="''", fix="give files, folders or patterns")
    if not inputs:
        raise UsageError("no input is named", fix="give files, folders or patterns of .jsonl or .jsonl.gz")
    if format not in ("auto", *formats):
        raise UsageError(f"input format {format!r}", expected=f"auto, {', '.join(formats)}")
    if filter and not any(is_address(name) or Path(name).is_dir() for name in inputs):
        raise UsageError(
            "--include and --exclude need a folder in the input", found=f"no folder among {few(list(map(str, inputs)))}"
        )
    by_path: dict[Path | Address, SourceFile] = {}
    skipped = SkippedFiles()
    search = _Search(format, filter, formats, skipped)
    for name in inputs:
        for file in search.files_of(str(name)):
            real = file.path if file.path == STDIN else file.path.resolve()
            if real in by_path:
                raise UsageError(f"{file.path} is named twice in the input", fix="name each file once")
            by_path[real] = file
    if skipped.counts:
        progress.note(f"skipped input: {skipped}")
    if filter.exclude and "excluded" not in skipped.counts:
        progress.note(f"nothing in the input matches --exclude {' '.join(filter.exclude)}")
    return Inputs(tuple(by_path.values()), skipped)


@dataclass(frozen=True)
class _Search:
    """What is read of that which an argument names, and what was skipped there."""

    format: Literal["auto"] | Format
    filter: PathFilter
    formats: tuple[Format, ...]
    skipped: SkippedFiles

    def files_of(self, name: str) -> Iterator[SourceFile]:
        # An existing folder with a name like "http:" is a path; anything else of that form is an address.
        if is_address(name) and not Path(name).exists():
            return self._of_storage(name)
        if address := address_of(name):
            raise neither(name, address)
        return (self._look_at(path) for path in self._paths(name))

    def _paths(self, name: str) -> Iterator[Path]:
        path = Path(name)
        if path == STDIN and name == "-":
            yield STDIN
        elif path.is_dir():
            yield from self._of_folder(name)
        elif path.exists() or not glob.has_magic(name):
            yield path
        else:
            matches = sorted(m for m in glob.glob(name, recursive=True) if not Path(m).is_dir())  # noqa: PTH207
            for match in matches:
                if is_result(Path(match)):
                    self.skipped.add("own result", match)
            taken = [match for match in matches if not is_result(Path(match))]
            if not taken:
                skipped_text = f"only {self.skipped}" if self.skipped.counts else None
                raise UsageError(
                    f"{name}: no file matches this pattern",
                    found=skipped_text,
                    fix="check the folder; quote the pattern",
                )
            yield from map(Path, taken)

    def _of_storage(self, name: str) -> Iterator[SourceFile]:
        from mdata.sources.object_files import first_bytes, objects_of

        all_endings, endings = endings_of(self.format, self.formats)
        objects = objects_of(name, endings, all_endings=all_endings, filter=self.filter, skipped=self.skipped)
        for facts, head in zip(objects, first_bytes(objects, HEAD_BYTES), strict=True):
            kind = _format_of(facts.address, head, asked=self.format, formats=self.formats)
            yield SourceFile(
                facts.address, facts.size_bytes, facts.modified_ns, kind, compression_of(head), etag=facts.etag
            )

    def _of_folder(self, name: str) -> list[Path]:
        all_endings, endings = endings_of(self.format, self.formats)
        here = SkippedFiles()
        files = files_below(Path(name), endings, all_endings=all_endings, filter=self.filter, skipped=here)
        files = without_metadata(files, here)
        if not files:
            plain = [ending for ending in endings if not ending.endswith(_COMPRESSED_ENDINGS[1:])]
            more = f", also followed by {', '.join(_COMPRESSED_ENDINGS[1:])} (except .parquet, .arrow and .feather)" * (
                "parquet" in self.formats
            )
            raise UsageError(
                f"{name}: no input in this folder",
                found=str(here) or None,
                expected="files that match --include and not --exclude"
                if self.filter
                else f"files named *{', *'.join(plain)}" + more * (len(plain) < len(endings)),
            )
        self.skipped.update(here)
        return files

    def _look_at(self, path: Path) -> SourceFile:
        if path == STDIN:
            if self.format in _BINARY:
                raise UsageError(f"{self.format} cannot be read from standard input", fix="name the file")
            _check_stdin()
            return SourceFile(STDIN, 0, 0, "jsonl" if self.format == "auto" else self.format)
        try:
            facts = path.stat()
            if not stat.S_ISREG(facts.st_mode):
                raise UsageError(
                    f"{path} is not a regular file", fix="write it to a file first, or use standard input (-)"
                )
            with path.open("rb") as file:
                head = file.read(HEAD_BYTES)
        except OSError as error:
            raise explain_os_error(error, "reading the input") from error
        kind = _format_of(path, head, asked=self.format, formats=self.formats)
        return SourceFile(path, facts.st_size, modified_ns(facts), kind, compression_of(head))


def endings_of(
    format: Literal["auto"] | Format, formats: tuple[Format, ...] = TEXT_FORMATS
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The endings of all formats that are read, and of the requested one."""
    all_endings = tuple(ending for kind in formats for ending in ENDINGS[kind])
    return all_endings, all_endings if format == "auto" else ENDINGS[format]


def _check_stdin() -> None:
    """Refuse a closed standard input (`<&-`), which would look like an empty one."""
    try:
        is_open = fcntl.fcntl(0, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
    except OSError:
        is_open = False
    if not is_open:
        raise UsageError("standard input is closed", expected="text, because the input is -", fix="name files")


def compression_of(head: bytes) -> Compression:
    """How data that begins with `head` is compressed."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    # A zstd file may begin with a skippable frame, whose first byte is 0x50 to 0x5f.
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F):
        return "zstd"
    if head.startswith(b"BZh") and len(head) > 5 and any(magic.startswith(head[4:10]) for magic in _BZIP2_BLOCKS):
        return "bzip2"
    return "xz" if head.startswith(b"\xfd7zXZ\0") else "none"


def refuse_foreign(path: Path | Address, head: bytes) -> None:
    """Refuse file formats that mdata does not read.

    Raises:
        UsageError: the data begins like one of them.
    """
    for kind in (kind for magic, kind in _UNSUPPORTED.items() if head.startswith(magic)):
        expected = (
            "text, lines of JSON, CSV, WARC or tar, plain or compressed by gzip, zstd, bzip2 or xz; parquet or Arrow"
        )
        fix = "unpack it, and name the files or their folder" if kind.endswith("archive") else None
        raise UsageError(f"{path} is {kind}, which mdata does not read", expected=expected, fix=fix)


def refuse_foreign_text(file: SourceFile, head: bytes, compression: Compression) -> None:
    """Refuse a stream whose content is in a format that mdata does not read, or does not read compressed.

    Raises:
        UsageError: the decompressed content begins like one of them.
    """
    if file.format != "html":  # its readers know every encoding
        refuse_wide_encoding(file.path, head)
    if file.format == "text" and begins_like_text(head):
        return
    refuse_foreign(file.path, head)
    actual = format_by_content(head)
    if actual == "tar" and file.format != "tar":
        raise _other_than_tar(file.path, compression, file.format)
    if compression != "none" and file.format == "jsonl" and actual is not None:
        fix = "decompress it first" if actual in _BINARY else _way_to_read(file.path, actual, compression)
        raise UsageError(f"{file.path} is {actual} compressed by {compression}, not lines of JSON", fix=fix)


def _other_than_tar(path: Path | Address, compression: Compression, format: Format) -> UsageError:
    packed = f" compressed by {compression}" if compression != "none" else ""
    fix = _way_to_read(path, "tar", compression)
    return UsageError(f"{path} is a tar archive{packed}, not {format}", fix=fix)


def _way_to_read(path: Path | Address, format: Format, compression: Compression) -> str:
    """How to have a file read as this format: by its name, as not every command has --input-format."""
    if path == STDIN:
        return f"--input-format {format}"
    return f"rename it to end in .{format}{_ENDING_OF[compression]}, and leave out any input format"


def format_by_content(head: bytes) -> Format | None:
    """The format of data that begins with `head`; None: it has no magic number."""
    if head.startswith(_TAR, _TAR_AT) and b"\0" in head[:_TAR_AT]:  # text may contain the word there
        return "tar"
    return next((format for magic, format in _MAGIC.items() if head.startswith(magic)), None)


def begins_like_text(head: bytes) -> bool:
    """Whether a text may begin with these bytes: some magic numbers are letters (PAR1, PARE, FEA1, WARC/)."""
    return _CONTROL.search(head) is None


def _format_of(
    path: Path | Address, head: bytes, *, asked: Literal["auto"] | Format, formats: tuple[Format, ...]
) -> Format:
    if formats != TEXT_FORMATS:
        return _page_format_of(path, head, asked=asked, formats=formats)
    refuse_wide_encoding(path, head)
    name = path.name.lower()
    named_text = asked == "auto" and name.endswith(ENDINGS["text"]) and not _FIRST_LINE_OF_WARC.match(head)
    if (asked == "text" or named_text) and begins_like_text(head):
        return "text"
    refuse_foreign(path, head)
    actual = format_by_content(head)
    if asked == "auto":
        by_name: tuple[Format, ...] = ("text", "csv", "tsv", "arrow", "warc", "tar")
        named = [format for format in by_name if name.endswith(ENDINGS[format])]
        return actual or (named[0] if named else "jsonl")
    if actual == "tar" and asked != "tar":
        raise _other_than_tar(path, "none", asked)
    if (actual in _BINARY or asked in _BINARY) and actual != asked:
        description = f"not {asked}" if asked in _BINARY else actual
        raise UsageError(f"{path} is {description}, but the input format is {asked}", fix="leave the input format out")
    return asked


def _page_format_of(
    path: Path | Address, head: bytes, *, asked: Literal["auto"] | Format, formats: tuple[Format, ...]
) -> Format:
    refuse_foreign(path, head)
    if asked != "auto":
        return asked
    # A dump in several files: enwiki-20261101-pages-articles1.xml-p1p41242.bz2
    name = _PAGE_RANGE.sub(".xml", path.name.lower())
    by_content = format_by_content(head) if format_by_content(head) in formats else None
    kind = by_content or next((kind for kind in formats if name.endswith(ENDINGS[kind])), None)
    if kind is None:
        raise UsageError(
            f"{path}: its name does not tell its format", expected=", ".join(formats), fix="--input-format FORMAT"
        )
    if kind != "html":
        refuse_wide_encoding(path, head)
    return kind


def check_unchanged(file: SourceFile) -> None:
    """Refuse a file that changed while it was read; standard input cannot be checked.

    Raises:
        UsageError: its size or modification time differs from the plan.
    """
    if file.path == STDIN:
        return
    if facts := file.as_object:
        from mdata.object_storage.reading import check_same

        check_same(facts)
        return
    assert isinstance(file.path, Path), "an object was checked above"
    try:
        now = file.path.stat()
    except OSError as error:
        raise explain_os_error(error, "reading the input") from error
    if (now.st_size, modified_ns(now)) != (file.size_bytes, file.modified_ns):
        raise UsageError(
            f"{file.path} changed while it was read",
            found=f"{now.st_size} bytes",
            expected=f"{file.size_bytes} bytes, unchanged",
            fix="wait until the program that writes it has finished",
        )
