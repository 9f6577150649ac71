"""Parses chunks of any format into text columns and bad rows; contains the parser of plain text itself.

A document of plain text is a whole file, or a paragraph, which ends before the line ends that separate it from the
next. The text is not changed: line ends and blanks are kept. Only UTF-8 is accepted; a byte order mark at the start of
a file was removed when the chunk was read.
"""

from __future__ import annotations

import re

from mdata.sources.input_files import Format
from mdata.sources.jsonl import parse_lines
from mdata.sources.record_batch import Column, ReadSpec, RecordBatch, decoded, read_one_by_one, too_long

_BETWEEN_PARAGRAPHS = re.compile(rb"(?>\r\n|\r|\n){2,}")


def parse(format: Format, data: bytes, *, spec: ReadSpec) -> RecordBatch:
    """The records of a chunk, and every bad row."""
    if format in ("jsonl", "tar"):
        return parse_lines(data, spec)
    if format == "text":
        return _parse_text(data, spec)
    if format in ("csv", "tsv"):
        from mdata.sources.csv_rows import parse_rows as parse_csv

        return parse_csv(format, data, spec)
    if format == "warc":
        from mdata.sources.warc import parse_records

        return parse_records(data, spec)
    from mdata.sources.arrow_columns import parse_rows

    return parse_rows(data, spec)


def _parse_text(data: bytes, spec: ReadSpec) -> RecordBatch:
    """The documents of a chunk of plain text; an empty file is an empty document."""
    if spec.text_documents == "file":
        documents = [data]
    else:
        documents = [paragraph for paragraph in _BETWEEN_PARAGRAPHS.split(data.strip(b"\r\n")) if paragraph]

    def text_of(document: bytes) -> str:
        if len(document) > spec.max_record_bytes:
            raise too_long(spec)
        return decoded(document)

    return read_one_by_one(documents, text_of, spec, columns=lambda texts: (Column(texts, None),), line_of=bytes)
