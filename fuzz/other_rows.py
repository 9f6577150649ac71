"""CSV, TSV, tar and dumps of MediaWiki: whatever the bytes, an error that names the file, or rows that do not depend on
how the file is divided and packed.

The first byte chooses the format, how large chunks are and how long a row may be; the rest is the file. Rows of CSV are
those of Python's csv module where it accepts the whole file.
"""

from __future__ import annotations

import csv
import gzip
import io

from fuzz.harness import scratch
from mdata.errors import BadInputError, UsageError
from mdata.sources.chunk import chunks
from mdata.sources.input_files import find_inputs
from mdata.sources.mediawiki import NotAPage, parse_head, parse_page, split_pages
from mdata.sources.parse import parse
from mdata.sources.record_batch import ReadSpec

FORMATS = ("csv", "tsv", "tar", "mediawiki")
SIZES = (1, 30, 500, 1 << 20)
Rows = tuple[list[str], list[str]]


def check(data: bytes) -> None:
    """One file."""
    choice, rest = (data[0] if data else 0), data[1:]
    format = FORMATS[choice & 3]
    spec = ReadSpec(max_record_bytes=SIZES[choice >> 4 & 3])
    plain = rows_of(rest, format, SIZES[choice >> 2 & 3], spec)
    assert plain == rows_of(gzip.compress(rest), format, 1 << 20, spec) or rest[:2] == b"\x1f\x8b"
    if plain is None or plain[1] or format not in ("csv", "tsv") or b"\r" in rest:
        return
    reader = csv.reader(
        io.StringIO(rest.decode().removeprefix("\ufeff"), newline=""),
        delimiter="," if format == "csv" else "\t",
        strict=True,
    )
    names, *rows = list(reader) or [[]]
    assert not rows or plain[0] == [row[names.index("text")] for row in rows if row]


def rows_of(data: bytes, format: str, chunk_bytes: int, spec: ReadSpec) -> Rows | None:
    """Texts, and kinds of bad rows; None: the file is refused."""
    path = scratch() / "x"
    path.write_bytes(data)
    texts, bad = list[str](), list[str]()
    try:
        (file,) = find_inputs([path], format=format, formats=FORMATS).files  # type: ignore[arg-type]
        for chunk in chunks([file], chunk_bytes, spec=spec):
            assert chunk.data is not None, "these formats are read as streams"
            if format != "mediawiki":
                batch = parse(file.format, chunk.data, spec=spec)
                texts += batch.columns[0].sentences
                bad += [row.kind for row in batch.bad_rows]
                continue
            head, pages = split_pages(chunk.data)
            parse_head(head)
            for page in pages:
                try:
                    texts.append(parse_page(page).text)
                except NotAPage:
                    bad.append("page")
    except (BadInputError, UsageError) as error:
        assert str(path) in str(error) and str(error).count("\n") <= 3, str(error)
        str(error).encode()
        return None
    return texts, bad
