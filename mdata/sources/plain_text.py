"""Plain text as records: a whole file, or each of its paragraphs, is one document.

The text is taken as it stands, line ends and blanks included; a paragraph ends before the line ends that
separate it from the next. Only UTF-8 is text; a byte order mark at the start of a file was taken off where
the piece was read.
"""

from __future__ import annotations

import re

from mdata.sources.record_batch import Column, Problem, ReadSpec, RecordBatch, Refused, decoded, too_long

_BETWEEN_PARAGRAPHS = re.compile(rb"(?>\r\n|\r|\n){2,}")


def parse_text(data: bytes, spec: ReadSpec) -> RecordBatch:
    """The documents of a piece of plain text; an empty file is an empty document."""
    documents = [data] if spec.text_documents == "file" else _paragraphs(data)
    texts: list[str] = []
    kept: list[int] = []
    problems: list[Problem] = []
    for row, document in enumerate(documents, start=1):
        try:
            if len(document) > spec.max_record_bytes:
                raise too_long(spec)
            texts.append(decoded(document))
            kept.append(row)
        except Refused as refusal:
            problems.append(refusal.problem(row, document, spec=spec))
    return RecordBatch(len(documents), kept if problems else None, (Column(texts, None),), problems)


def _paragraphs(data: bytes) -> list[bytes]:
    return [paragraph for paragraph in _BETWEEN_PARAGRAPHS.split(data.strip(b"\r\n")) if paragraph]
