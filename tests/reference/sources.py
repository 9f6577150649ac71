"""Twin of mdata/sources/record_boundaries.py and chunk.py: the chunks of a whole text in memory.

A record belongs to the chunk in whose bytes it begins; bytes before the first record belong to none.
"""

from __future__ import annotations

LINE_ENDS = (b"\n", b"\r", b"\r\n")
BLANKS = b" \t\n\r\x0b\x0c"


def lines(text: bytes) -> list[bytes]:
    """Return the lines with their ends: LF, CR LF or a lone CR."""
    return text.splitlines(keepends=True)


def paragraphs(text: bytes) -> list[bytes]:
    """Return runs of lines, each with the empty lines that end it; empty lines before the first come first."""
    found = [b""]
    after_empty = True
    for line in lines(text):
        empty = line in LINE_ENDS
        if after_empty and not empty:
            found.append(b"")
        found[-1] += line
        after_empty = empty
    return found


def chunks(text: bytes, chunk_bytes: int, *, by_paragraph: bool, longest: int, blank_end: bool = True) -> list[bytes]:
    """Return the bytes of each chunk; a last record too long for `longest` is cut four bytes later.

    Without `blank_end` the last line is not a record if it is ASCII white space of at most `longest` bytes.
    """
    found = [b"" for _ in range(0, len(text), chunk_bytes)]
    first = [0] * len(found)
    place = 0
    records = paragraphs(text) if by_paragraph else lines(text)
    if not blank_end and records and len(records[-1]) <= longest and all(byte in BLANKS for byte in records[-1]):
        records.pop()
    for number, record in enumerate(records):
        if record and not (by_paragraph and number == 0):
            chunk = place // chunk_bytes
            if not found[chunk]:
                first[chunk] = place
            found[chunk] += record
        place += len(record)
    limits = [(k + 1) * chunk_bytes + longest + 4 - first[k] for k in range(len(found))]
    return [data[:limit] for data, limit in zip(found, limits, strict=True)]


def documents(text: bytes) -> list[bytes]:
    """Return the paragraphs without the line ends around them."""
    return [paragraph.strip(b"\r\n") for paragraph in paragraphs(text) if paragraph.strip(b"\r\n")]
