"""Tar archives: members with lines of JSON, and samples of WebDataset, as lines of JSON.

The lines of members named .jsonl, .jsonlines or .ndjson are rows. Other members are grouped, as WebDataset does: those
that follow each other and have the same name up to its first dot are one row, which has the fields of their .json, the
content of their .txt as `text`, and the name as `__key__` if there is no .json. Members of other kinds (images, sounds)
are passed over. Compressed ones are refused by name, because their texts would be lost; so is one with two endings
(`a.en.txt`, to WebDataset the field `en.txt`) of a sample that has no other text.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from mdata.errors import BadInputError, UsageError
from mdata.sources.input_files import SourceFile
from mdata.sources.record_batch import ReadSpec
from mdata.sources.record_boundaries import DecompressedText

_LINES = (".jsonl", ".jsonlines", ".ndjson")
_REFUSED = (".gz", ".zst", ".bz2", ".xz", ".parquet", ".arrow", ".tar", ".zip")
_FIELDS = {"json": "json", "txt": "text", "text": "text", "md": "text"}  # of samples, by ending
_READ_BYTES = 1 << 16
_KEPT_BYTES = 1 << 16  # tarfile reads 10 KiB at once
_OVERHANG = 4  # a row that is too long is cut this much behind the limit, which shows it
_LINE_ENDS = re.compile(rb"[\r\n]")
_ROW_ENDS = re.compile(rb"\r\n|\r|\n")  # as lines of JSON are read


def row_spans(text: DecompressedText, file: SourceFile, *, spec: ReadSpec) -> Iterator[MemberRows]:
    """Rows as lines of JSON, with the members that they are from.

    Raises:
        BadInputError: the archive is damaged. UsageError: it has no texts, or compressed members.
    """
    stream, longest, some = _Stream(text), spec.max_record_bytes + _OVERHANG, False
    sample: dict[str, bytes] = {}
    of_sample: list[str] = []
    key = unread_key = unread_name = ""
    header_at = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
            while (member := archive.next()) is not None:
                archive.members = []  # it would keep all
                header_at = archive.offset
                folder, _, name = member.name.rpartition("/")
                if not member.isfile() or name.startswith("."):
                    continue
                content: IO[bytes] = archive.extractfile(member)
                if name.lower().endswith(_REFUSED):
                    fix = "unpack the archive and name the folder"
                    raise UsageError(f"{file.path}: its member {member.name} is an archive or compressed", fix=fix)
                stem, _, kind = name.partition(".")
                if unread_name and f"{folder}/{stem}" != unread_key:
                    _refuse_unread(file, unread_name, lost=unread_key != key)
                    unread_name = ""
                field = _FIELDS.get(kind.lower())
                # A second member of one field would replace the first.
                if sample and (f"{folder}/{stem}" != key or field in sample):
                    yield _sample_row(stream.at, sample, key, of_sample, longest)
                    sample, of_sample = {}, []
                if name.lower().endswith(_LINES):
                    number = 1
                    for line in _lines(content, longest):
                        rows = 1 if b"\r" not in line else len(_ROW_ENDS.findall(line + b"\n"))
                        yield MemberRows(stream.at, line + b"\n", rows, member.name, number)
                        number += rows
                        some = True
                elif field is not None:
                    key, some = f"{folder}/{stem}", True
                    sample[field] = content.read(longest)
                    of_sample.append(member.name)
                elif kind.lower().rpartition(".")[2] in _FIELDS:
                    unread_key, unread_name = f"{folder}/{stem}", member.name
            if unread_name:
                _refuse_unread(file, unread_name, lost=unread_key != key)
            # tarfile takes a header that it cannot read for the end.
            stream.check_end(archive.offset)
    except tarfile.TarError as error:
        raise BadInputError(
            # Blocks of 10 KiB are read; behind the last member is the header that cannot be read.
            f"{file.path}: the archive is damaged at byte {min(stream.at, header_at):,}",
            found=str(error),
            fix="download or write the file again",
        ) from error
    if sample:
        yield _sample_row(stream.at, sample, key, of_sample, longest)
    if not some and stream.at:
        expected = ", ".join((*_LINES, *(f".{kind}" for kind in _FIELDS)))
        raise UsageError(f"{file.path} has no members with text", expected=f"names that end in {expected}")


def _refuse_unread(file: SourceFile, name: str, *, lost: bool) -> None:
    """Refuse the member of this name if its sample has no other text."""
    if lost:
        raise UsageError(
            f"{file.path}: its member {name} has two endings, a field that is not read",
            expected="one ending, as in a.txt or a.json",
            fix="rename the members, or unpack the archive and name the folder",
        )


class MemberRows(NamedTuple):
    """Rows of an archive: where in it they were complete, their lines of JSON, and how many these are; the members.

    `line`: the first in its member, from 1; 0: a sample, which is whole members.
    """

    at: int
    data: bytes
    rows: int
    names: str
    line: int


def _sample_row(at: int, sample: dict[str, bytes], key: str, names: list[str], longest: int) -> MemberRows:
    return MemberRows(at, _row_of(sample, key, longest), 1, " and ".join(names), 0)


class _Stream:
    """A text as a file that is read once; the last bytes are kept, of which tarfile has not used all."""

    def __init__(self, text: DecompressedText) -> None:
        self._text = text
        self.at = 0

    def read(self, size: int) -> bytes:
        """The next bytes; fewer at the end only."""
        data = self._text.read(self.at, size)
        self.at += len(data)
        self._text.drop(self.at - _KEPT_BYTES)
        return data

    def check_end(self, at: int) -> None:
        """Check that nothing but zeros follows, which end an archive.

        Raises:
            TarError: something does.
        """
        while block := self._text.read(at, _READ_BYTES):
            if block.strip(b"\0"):
                raise tarfile.ReadError("no header of a member, nor the end of the archive")
            at += len(block)
            self._text.drop(at)


def _lines(content: IO[bytes], longest: int) -> Iterator[bytes]:
    """The lines of a member without their ends, each up to `longest`; a blank one at its end is no row."""
    held, size = list[bytes](), 0
    before: bytes | None = None

    def add(piece: bytes) -> None:
        nonlocal size
        held.append(piece[: max(0, longest - size)])
        size += len(piece)

    while block := content.read(_READ_BYTES):
        *complete, rest = block.split(b"\n")
        for line in complete:
            add(line)
            if before is not None:
                yield before
            before, held, size = b"".join(held), [], 0
        add(rest)
    rest = b"".join(held)
    if before is not None and (before.strip() or rest):
        yield before
    if rest.strip():
        yield rest


def _row_of(sample: dict[str, bytes], key: str, longest: int) -> bytes:
    """A sample as one line; what cannot be read is left to the parser of lines, which says why."""
    fields, text = sample.get("json"), sample.get("text")
    too_long = [part for part in (fields, text) if part is not None and len(part) >= longest]
    if too_long:
        return _LINE_ENDS.sub(b" ", too_long[0]) + b"\n"
    try:
        record: Any = {"__key__": key.removeprefix("/")} if fields is None else json.loads(fields)
        if text is not None and isinstance(record, dict):
            record["text"] = text.decode()
        elif fields is not None and not _LINE_ENDS.search(fields):
            return fields + b"\n"
        return json.dumps(record).encode() + b"\n"
    except (ValueError, RecursionError):
        return _LINE_ENDS.sub(b" ", text if fields is None and text is not None else fields or b"") + b"\n"
