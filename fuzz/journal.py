"""The reader of journals: records, whatever the bytes; never an error, because an unreadable line ends a journal.

The first byte chooses: the file as it comes, or lines to each of which its hash is put, so that what is behind the hash
is reached. The records that come out, written again, are the beginning of the file; one more record can be appended
behind them, and is read.
"""

from __future__ import annotations

from blake3 import blake3

from fuzz.harness import scratch
from mdata.preprocessing.journal import Journal, read_records

MORE = {"kind": "merged", "key": "text"}


def check(data: bytes) -> None:
    """One journal."""
    content = hashed(data[1:]) if data[:1] and data[0] & 1 else data[1:]
    path = scratch() / "x.journal"
    path.write_bytes(content)
    records = read_records(path)[0]
    assert all(isinstance(record, dict) and isinstance(record.get("kind"), str) for record in records)
    journal = Journal(path)
    assert journal.records == records
    whole = path.read_bytes()
    assert content.startswith(whole) and whole.count(b"\n") == len(records), "what does not count is cut off"
    journal.append(MORE)
    journal.close()
    assert read_records(path)[0] == [*records, MORE]


def hashed(text: bytes) -> bytes:
    """Each line as a record is written."""
    lines = text.split(b"\n")
    return b"".join(blake3(line).hexdigest()[:16].encode() + b" " + line + b"\n" for line in lines)
