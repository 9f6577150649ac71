"""Reads inputs again that parts found with different modification times, and compares them with what each part read.

If the size is the same, a file may only have been touched, or one row may have been corrected and one part made again.
The times cannot decide this, so the pieces that each part recorded are compared with the file as it is now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from mdata.errors import UsageError
from mdata.manifest.types import InputFile
from mdata.progress import Progress
from mdata.sources.chunk import chunk_digest, chunks, read_chunk
from mdata.sources.input_files import Section, find_inputs
from mdata.sources.record_batch import ReadSpec
from mdata.sources.row_filter import parse_filter
from mdata.sources.text_template import parse_template


def with_times_now(
    parts: Sequence[Sequence[InputFile]], options: dict[str, Any], *, progress: Progress
) -> list[list[InputFile]]:
    """The inputs of the parts, with one modification time for each file that they share.

    Args:
        parts: the inputs of each part, in order.
        options: as the parts record them.
        progress: receives a note on each file that is read again.

    Raises:
        UsageError: a file differs from what a part read; names the part.
    """
    times: dict[str, set[int]] = {}
    for inputs in parts:
        for file in inputs:
            times.setdefault(file.path, set()).add(file.modified_ns)
    now = {}
    for path in (path for path, found in times.items() if len(found) > 1):
        progress.note(f"reading {path} again: the parts found it with different times of change")
        now[path] = _compared(path, _sections(parts, path), options)
    return [
        [msgspec.structs.replace(file, modified_ns=now.get(file.path, file.modified_ns)) for file in inputs]
        for inputs in parts
    ]


def _sections(parts: Sequence[Sequence[InputFile]], path: str) -> Iterator[tuple[int, InputFile]]:
    return ((number, file) for number, inputs in enumerate(parts, 1) for file in inputs if file.path == path)


def _compared(path: str, read: Iterator[tuple[int, InputFile]], options: dict[str, Any]) -> int:
    """The present modification time of the file."""
    (source,) = find_inputs([path], format=options["input_format"]).files
    spec = ReadSpec(
        json_keys=tuple(options["json_keys"]),
        text_documents=options["text_documents"],
        max_record_bytes=options["max_record_bytes"],
        template=parse_template(options["text_template"]) if "text_template" in options else None,
        where=parse_filter(options["where"]) if "where" in options else None,
    )
    for number, file in read:
        section = file.section or None
        assert section is not None, "a whole file is read by one part"
        part = replace(source, section=Section(section.start, section.stop, section.total, 0))
        found = chunks([part], file.block_bytes, spec=spec)
        pieces = "".join(chunk_digest(read_chunk(chunk, spec)).hex() for chunk in found)
        if source.size_bytes != file.bytes or pieces != section.pieces:
            raise UsageError(
                f"{path} is not what part {number} read",
                found=f"{source.size_bytes} bytes, with other text in {file.name}",
                expected=f"{file.bytes} bytes, as part {number} found it",
                fix=f"make part {number} again, with --overwrite; nothing was changed",
            )
    return source.modified_ns
