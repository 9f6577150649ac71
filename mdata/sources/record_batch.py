"""The data passed from reading to tokenizing: how records are read, and the text columns that they become.

A `RecordBatch` holds the good records of one chunk as one `Column` per key, so that a tokenizer gets plain lists of
strings, and also every bad row, with its reason. Rows count from 1 inside the chunk; code that reads chunks in order
adds the rows before it. All of this is plain data that can be sent between processes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

from mdata.errors import BadInputError
from mdata.sources.chat_schema import ChatSchema
from mdata.sources.conversation import WritesMessages
from mdata.sources.row_filter import RowFilter
from mdata.sources.text_template import TextTemplate
from mdata.util.regular_files import wide_encoding

Kind = Literal[
    "bad-chat",
    "bad-text",
    "bad-value",
    "blank",
    "no-key",
    "not-csv",
    "not-json",
    "not-object",
    "not-utf8",
    "surrogate",
    "torn",
    "too-deep",
    "too-long",
]
R = TypeVar("R")
V = TypeVar("V")
_EXCERPT_CHARACTERS = 80
# How to avoid a kind of bad row, besides correcting it.
_FIXES: dict[Kind, str] = {
    "blank": "sed -i '/^[[:space:]]*$/d' FILE removes blank lines; or ",
    "no-key": "another key ({}); or ",
    "torn": "download the file again; or ",
    "too-long": "a larger --max-record-bytes, such as 1G, if the record is good; or ",
}


class ArchiveMember(NamedTuple):
    """A member of an archive: the first row of the chunk that is in it, its name, and the line of that row.

    Line 0: the row is the whole member.
    """

    row: int
    name: str
    line: int


class ChunkContent(NamedTuple):
    """A chunk of a stream: its bytes or rows in the text, its records, and its size in the file on disk.

    `damage`: why the rest of the file after the chunk cannot be read (`ReadSpec.keep_torn`). `members`: of an archive,
    in the order of their rows.
    """

    start: int
    stop: int
    data: bytes
    file_bytes: int
    damage: str = ""
    members: tuple[ArchiveMember, ...] = ()


@dataclass(frozen=True)
class ReadSpec:
    """How records are read from bytes.

    Args:
        json_keys: keys whose values are the text; for parquet and Arrow, columns. With a template only names.
        text_documents: a document of plain text is a file, or a paragraph (ended by an empty line).
        max_record_bytes: a longer line, paragraph or value is a bad row ("too-long"), never completely in memory.
        keep_bad_lines: bad rows carry the bytes of their lines (for quarantine).
        sentence_lists: a value may be a list of sentences; if false, such a row is bad ("bad-value").
        chat: values are conversations, and these turns are trained on (`mdata.chat`); the texts of a document are then
            role, content, role, content ... None: values are text.
        chat_template: the template that writes conversations; it decides which fields matter.
        chat_schema: which fields of a record hold its conversation.
        template: builds the text from several text columns. None: each key has its own text.
        where: rows for which this is not true are left out; they count neither as records nor as bad rows.
        tokens: values are lists of token ids; a document's text is then its ids with blanks between them.
        key_option: of the command, for json_keys; for messages.
        keep_torn: damaged WARC files and dumps of MediaWiki end where the damage begins, and their last chunk names it.
    """

    json_keys: tuple[str, ...] = ("text",)
    text_documents: Literal["file", "paragraph"] = "file"
    max_record_bytes: int = 64 << 20
    keep_bad_lines: bool = False
    sentence_lists: bool = True
    chat: str | None = None
    chat_template: WritesMessages | None = None
    chat_schema: ChatSchema = "messages"
    template: TextTemplate | None = None
    where: RowFilter | None = None
    tokens: bool = False
    key_option: str = "--json-keys"
    keep_torn: bool = False

    @property
    def as_lines(self) -> bool:
        """Whether rows of parquet and Arrow become lines of JSON: their values are more than texts."""
        return self.chat is not None or self.tokens

    @property
    def text_columns(self) -> dict[str, bool]:
        """The columns that become text, and whether each may be missing."""
        return self.template.fields if self.template else dict.fromkeys(self.json_keys, False)


@dataclass(frozen=True)
class Column:
    """The texts of one key: all sentences, and the running count of sentences at the end of each document.

    `ends` is None if every document is one sentence.
    """

    sentences: list[str]
    ends: list[int] | None


class BadRowError(BadInputError):
    """A bad row stops the command."""


@dataclass(frozen=True)
class BadRow:
    """An unusable row: its number (from 1), the kind of fault, the reason, and the beginning of its line.

    `member`: of an archive, that has it, with the line.
    """

    row: int
    kind: Kind
    reason: str
    excerpt: str
    line: bytes | None = None
    member: str = ""

    def place(self, path: object, rows_before: int = 0) -> str:
        """File and row, and the member of an archive, as messages name them."""
        return f"{path}:{rows_before + self.row}" + (f" (member {self.member})" if self.member else "")

    def _other_fix(self, row: int, key_option: str) -> str:
        begins_file = row == 1 and self.kind in ("not-json", "not-object")
        if begins_file and self.excerpt[1:].startswith("\\ufeff"):
            return "sed -i '1s/^\\xEF\\xBB\\xBF//' FILE removes the byte order mark; or "
        if begins_file and self.excerpt[1:].lstrip().startswith("["):
            return "jq -c '.[]' FILE > NEW.jsonl turns a JSON array into lines; or "
        return _FIXES.get(self.kind, "").format(key_option)

    def as_error(self, path: object, rows_before: int = 0, *, key_option: str = "--json-keys") -> BadRowError:
        """The error that names file, row and reason.

        Args:
            key_option: of the command, for the names of keys.
        """
        return BadRowError(
            f"{self.place(path, rows_before)}: {self.reason}",
            found=self.excerpt,
            fix=self._other_fix(rows_before + self.row, key_option)
            + "correct or remove this record, or skip such records (--on-error skip)",
        )


@dataclass(frozen=True)
class RecordBatch:
    """The records of one chunk.

    Args:
        rows: number of rows, including bad and filtered ones.
        kept: the rows (from 1) of the records in the columns; None: all of them.
        columns: one per key, all with the same number of documents.
        bad_rows: every bad row, in order.
    """

    rows: int
    kept: list[int] | None
    columns: tuple[Column, ...]
    bad_rows: list[BadRow]


class BadRecord(Exception):
    """The reason why a row cannot become a record."""

    def __init__(self, kind: Kind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind

    def bad_row(self, row: int, line: bytes, *, spec: ReadSpec) -> BadRow:
        """The bad row of this number, whose bytes are `line`."""
        excerpt = line[: 4 * _EXCERPT_CHARACTERS].decode(errors="backslashreplace")
        stored_line = line if spec.keep_bad_lines else None
        return BadRow(row, self.kind, str(self), repr(excerpt[:_EXCERPT_CHARACTERS]), stored_line)


def read_one_by_one(
    rows: Iterable[R],
    read: Callable[[R], V | None],
    spec: ReadSpec,
    *,
    columns: Callable[[list[V]], tuple[Column, ...]],
    line_of: Callable[[R], bytes],
) -> RecordBatch:
    """Read each row alone, so that bad rows are found.

    Args:
        read: the record of a row; None: it is filtered out. Raises BadRecord.
        columns: of the records. line_of: the bytes of a bad row.
    """
    num_rows, kept = 0, list[int]()
    records, bad_rows = list[V](), list[BadRow]()
    for num_rows, row in enumerate(rows, start=1):
        try:
            record = read(row)
        except BadRecord as refusal:
            bad_rows.append(refusal.bad_row(num_rows, line_of(row), spec=spec))
            continue
        if record is not None:
            records.append(record)
            kept.append(num_rows)
    return RecordBatch(num_rows, kept if len(kept) < num_rows else None, columns(records), bad_rows)


def in_members(bad_rows: Sequence[BadRow], members: Sequence[ArchiveMember]) -> list[BadRow]:
    """The bad rows of a chunk with the members that they are in; the same where there are none."""
    if not members:
        return [*bad_rows]
    first_rows = [member.row for member in members]
    named = []
    for bad_row in bad_rows:
        member = members[bisect_right(first_rows, bad_row.row) - 1]
        line = f", line {member.line + bad_row.row - member.row}" if member.line else ""
        named.append(replace(bad_row, member=f"{member.name}{line}"))
    return named


def too_long(spec: ReadSpec) -> BadRecord:
    """The fault of a record longer than the limit."""
    return BadRecord("too-long", f"longer than {spec.max_record_bytes:,} bytes (max_record_bytes)")


def list_refused(key: str) -> BadRecord:
    """The fault of a list of sentences where texts are split into sentences."""
    return BadRecord("bad-value", f"key {key!r} holds a list, and a list of sentences cannot be split into sentences")


def decoded(data: bytes) -> str:
    """Strict UTF-8.

    Raises:
        BadRecord: names the first wrong byte; says so if the text looks like UTF-16.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        name = wide_encoding(data)
        guess = f" (this looks like {name})" if name else ""
        problem = f"not UTF-8: byte 0x{data[error.start]:02x} at byte {error.start + 1}{guess}"
        raise BadRecord("not-utf8", problem) from error


def column_of(values: list[str] | list[list[str]] | list[str | list[str]], spec: ReadSpec) -> Column | None:
    """Strings and lists of strings as a column; None if any value is something else.

    Lone surrogates are not detected here.
    """
    kinds = set(map(type, values))
    if kinds <= {str} and spec.chat is None:  # conversations are lists, even in an empty column
        return Column(values, None)  # type: ignore[arg-type]
    if not kinds <= {str, list} or not spec.sentence_lists:
        return None
    sentences: list[str] = []
    ends: list[int] = []
    for value in values:
        if type(value) is list:
            sentences += value
        else:
            sentences.append(value)  # type: ignore[arg-type]
        ends.append(len(sentences))
    return Column(sentences, ends) if set(map(type, sentences)) <= {str} else None
