"""WARC files: whatever the bytes, an error that names the file, or the records of the slow twin.

The first byte chooses how large chunks are, how long a text may be and whether the file is packed; the rest is the
file. What is taken must be what tests/reference/warc.py finds, the second time in one chunk as well.
"""

from __future__ import annotations

import gzip

from fuzz.harness import scratch
from mdata.errors import BadInputError, UsageError
from mdata.sources.chunk import chunks, read_chunk
from mdata.sources.input_files import find_inputs
from mdata.sources.parse import parse
from mdata.sources.record_batch import ReadSpec
from tests.reference import warc as twin

SIZES = (1, 30, 500, 1 << 20)


def check(data: bytes) -> None:
    """One file."""
    choice, rest = (data[0] if data else 0), data[1:]
    path = scratch() / "x.wet"
    path.write_bytes(gzip.compress(rest) if choice & 1 else rest)
    spec = ReadSpec(max_record_bytes=SIZES[choice >> 3 & 3])
    try:
        (file,) = find_inputs([path], format="warc").files
        found = [
            parse("warc", read_chunk(chunk, spec), spec=spec)
            for chunk in chunks([file], SIZES[choice >> 1 & 3], spec=spec)
        ]
    except (BadInputError, UsageError) as error:  # usage: it begins like another format
        assert str(path) in str(error) and str(error).count("\n") <= 3, str(error)
        str(error).encode()
        return
    if file.compression != "none" and not choice & 1:
        return  # packed already, which the twin does not undo
    good, bad = [], 0
    for fields, block in twin.records(rest):
        kind = fields.get("content-type", "").partition(";")[0].strip().lower()
        if fields.get("warc-type", "").lower() not in ("conversion", "resource") or kind != "text/plain":
            continue
        try:
            text = block.decode()
        except UnicodeDecodeError:
            bad += 1
            continue
        if len(block) <= spec.max_record_bytes:
            good.append(text)
        else:
            bad += 1
    assert [text for batch in found for text in batch.columns[0].sentences] == good
    assert sum(len(batch.bad_rows) for batch in found) == bad
