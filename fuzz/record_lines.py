"""The parser of lines of JSON and of plain text: each row as its slow twin says, good or bad, whatever the bytes.

The first byte chooses the keys, a small limit of the record's size, and the format; the rest is the chunk. No
exception of any kind may come out, because what cannot be taken is a `BadRow`. One thing the twin cannot say: between
500 and 1,025 levels of nesting Python's own spellings decide, so lines with that many brackets are not compared.
"""

from __future__ import annotations

from mdata.sources.parse import parse
from mdata.sources.record_batch import ReadSpec, RecordBatch
from tests.reference.records import record
from tests.reference.sources import documents

MANY_BRACKETS = 500
SMALL_LIMIT = 40


def check(data: bytes) -> None:
    """One chunk."""
    choice, chunk = (data[0] if data else 0), data[1:]
    limit = SMALL_LIMIT if choice & 1 else 1 << 20
    if choice & 2:
        check_text(chunk, ReadSpec(max_record_bytes=limit, text_documents="paragraph" if choice & 4 else "file"))
    else:
        keys = ("text", "meta.text", "b") if choice & 4 else ("text",)
        check_lines(chunk, ReadSpec(json_keys=keys, max_record_bytes=limit, keep_bad_lines=bool(choice & 8)))


def check_lines(chunk: bytes, spec: ReadSpec) -> None:
    """Every line against the twin."""
    lines = chunk.splitlines()
    batch = parse("jsonl", chunk, spec=spec)
    assert batch.rows == len(lines)
    for line, found in zip(lines, by_row(batch), strict=True):
        if line.count(b"[") + line.count(b"{") > MANY_BRACKETS:
            continue
        expected = "too-long" if len(line) > spec.max_record_bytes else record(line, spec.json_keys)
        if not isinstance(expected, str):
            expected = [value if isinstance(value, list) else [value] for value in expected]
        assert found == expected, (line, found, expected)
    for bad_row in batch.bad_rows:
        assert bad_row.line == (lines[bad_row.row - 1] if spec.keep_bad_lines else None)
        check_message(str(bad_row.as_error("x.jsonl")))


def check_text(chunk: bytes, spec: ReadSpec) -> None:
    """Every document of a plain text against the twin."""
    whole = spec.text_documents == "file"
    wanted = [chunk] if whole else documents(chunk)
    batch = parse("text", chunk, spec=spec)
    assert batch.rows == len(wanted)
    for document, found in zip(wanted, by_row(batch), strict=True):
        if len(document) > spec.max_record_bytes:
            assert found == "too-long"
        else:
            assert found == ("not-utf8" if (text := utf8(document)) is None else [[text]])


def by_row(batch: RecordBatch) -> list[str | list[list[str]]]:
    """For each row the sentences of each key, or the kind of fault."""
    rows: dict[int, str | list[list[str]]] = {bad_row.row: bad_row.kind for bad_row in batch.bad_rows}
    for number, row in enumerate(range(1, batch.rows + 1) if batch.kept is None else batch.kept):
        assert row not in rows, f"row {row} is good and bad"
        spans = [
            (number, number + 1) if c.ends is None else (c.ends[number - 1] if number else 0, c.ends[number])
            for c in batch.columns
        ]
        rows[row] = [column.sentences[a:b] for column, (a, b) in zip(batch.columns, spans, strict=True)]
    assert sorted(rows) == list(range(1, batch.rows + 1)), "a row is neither good nor bad"
    return [rows[row] for row in range(1, batch.rows + 1)]


def utf8(data: bytes) -> str | None:
    """Strict UTF-8, or None."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def check_message(message: str) -> None:
    """An error is one to four lines that any terminal can show."""
    lines = message.split("\n")
    assert len(lines) <= 4 and len(message) < 2000, message
    message.encode()
