"""How much of the input a run has processed: files, rows and counts, as state that a journal can record.

The hash of an input is known after its last chunk: BLAKE3 over the BLAKE3s of its chunks. Until then the digests of its
chunks are kept, because a later run may have to prove that the part already read has not changed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3


@dataclass
class InputState:
    """One file as far as it was read: its size and time, and the digests of its chunks."""

    path: str
    size_bytes: int
    modified_ns: int
    rows: int = 0
    hash: str | None = None
    digests: list[bytes] = field(default_factory=list)
    # The digests of a section are kept: joining the parts computes the hash of the file from them.
    is_section: bool = False


@dataclass
class JobState:
    """Counts of a run, in the order of the input.

    Attributes:
        inputs: files that were started, in order; all but the last are closed.
        rows: rows read in all files.
        records: rows that are records.
        bad: bad rows, the sum of `skipped`.
        skipped: bad rows by kind.
        special: special tokens in the texts, by key.
    """

    num_keys: int
    inputs: list[InputState] = field(default_factory=list)
    rows: int = 0
    records: int = 0
    bad: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    special: list[int] = field(default_factory=list)
    # Already in the journal: closed inputs, and digests of the open one.
    _recorded_inputs: int = 0
    _recorded_digests: int = 0

    def __post_init__(self) -> None:
        self.special = self.special or [0] * self.num_keys

    @property
    def filtered(self) -> int:
        """Rows that are neither records nor bad."""
        return self.rows - self.records - self.bad

    @property
    def next_chunk(self) -> tuple[int, int]:
        """The numbers of the next file and chunk."""
        if not self.inputs or self.inputs[-1].hash is not None:
            return len(self.inputs), 0
        return len(self.inputs) - 1, len(self.inputs[-1].digests)

    def open_input(self, path: str, size_bytes: int, *, modified_ns: int, is_section: bool = False) -> None:
        """Start the next file."""
        self.close_input()
        self.inputs.append(InputState(path, size_bytes, modified_ns, is_section=is_section))
        self._recorded_digests = 0

    def close_input(self) -> None:
        """Record that all chunks of the last file are done."""
        if self.inputs and (last := self.inputs[-1]).hash is None:
            last.hash = blake3(b"".join(last.digests)).hexdigest()
            if not last.is_section:
                last.digests.clear()

    def count_chunk(self, rows: int, digest: bytes, *, records: int, special: list[int]) -> None:
        """Record that a chunk of the current file is done."""
        self.inputs[-1].rows += rows
        self.inputs[-1].digests.append(digest)
        self.rows += rows
        self.records += records
        self.special = [old + new for old, new in zip(self.special, special, strict=True)]

    def count_bad_row(self, kind: str) -> None:
        """Count a bad row."""
        self.skipped[kind] += 1
        self.bad += 1

    def new_record(self) -> dict[str, Any]:
        """A record for the journal: counts, and the changes of the inputs since the previous record."""
        first = self._recorded_inputs
        inputs = [
            {"path": s.path, "size_bytes": s.size_bytes, "modified_ns": s.modified_ns, "rows": s.rows, "hash": s.hash}
            | ({"is_section": True, "digests": b"".join(s.digests).hex() if s.hash else ""} if s.is_section else {})
            for s in self.inputs[first:]
        ]
        digests = self.inputs[-1].digests[self._recorded_digests :] if self.inputs else []
        return {
            "first_input": first,
            "inputs": inputs,
            "digests": b"".join(digests).hex(),
            "rows": self.rows,
            "records": self.records,
            "skipped": dict(self.skipped),
            "special": self.special,
        }

    def mark_recorded(self) -> None:
        """Note that the last `new_record` is in the journal."""
        self._recorded_inputs = self.next_chunk[0]
        self._recorded_digests = len(self.inputs[-1].digests) if self.inputs else 0

    def replay(self, record: dict[str, Any]) -> None:
        """Apply a record of the journal; records must be applied in order."""
        first = record["first_input"]
        begun = self.inputs[first].digests if first < len(self.inputs) else []
        self.inputs[first:] = [
            InputState(**{**fields, "digests": _split(fields.get("digests", ""))}) for fields in record["inputs"]
        ]
        if self.inputs and self.inputs[-1].hash is None:
            # Digests of earlier records count if they are of this same file.
            earlier = begun if first == len(self.inputs) - 1 else []
            self.inputs[-1].digests = earlier + _split(record["digests"])
        self.rows = record["rows"]
        self.records = record["records"]
        self.skipped = Counter(record["skipped"])
        self.bad = self.skipped.total()
        self.special = record["special"]
        self.mark_recorded()


def _split(digests: str) -> list[bytes]:
    joined = bytes.fromhex(digests)
    return [joined[i : i + 32] for i in range(0, len(joined), 32)]
