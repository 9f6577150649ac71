"""What a run has taken so far: inputs, rows, and counts. Pure state that a journal can keep.

The hash of an input is known when its last piece was taken: BLAKE3 over the BLAKE3s of its pieces. Until
then the digests of its pieces are kept, because a later run may have to prove that the part which was read
has not changed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3


@dataclass
class InputState:
    """One file as far as it was taken: how it was found, and the digests of its pieces."""

    path: str
    size_bytes: int
    modified_ns: int
    rows: int = 0
    hash: str | None = None
    digests: list[bytes] = field(default_factory=list)

    def close(self) -> None:
        """Its last piece was taken."""
        self.hash = blake3(b"".join(self.digests)).hexdigest()
        self.digests.clear()


@dataclass
class Ledger:
    """Counts of a run, in the order of the input.

    Attributes:
        inputs: files begun, in order; all but the last are closed.
        rows: rows passed over in all files.
        records: records taken.
        bad: rows that were not taken, the sum of `skipped`.
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
    # What the journal knows already: inputs that are closed, digests of the one that is not.
    _journaled_inputs: int = 0
    _journaled_digests: int = 0

    def __post_init__(self) -> None:
        self.special = self.special or [0] * self.num_keys

    @property
    def next_piece(self) -> tuple[int, int]:
        """The file and the number in it of the first piece that was not taken."""
        if not self.inputs or self.inputs[-1].hash is not None:
            return len(self.inputs), 0
        return len(self.inputs) - 1, len(self.inputs[-1].digests)

    def open_input(self, path: str, size_bytes: int, *, modified_ns: int) -> None:
        """The next file begins."""
        self.close_last()
        self.inputs.append(InputState(path, size_bytes, modified_ns))
        self._journaled_digests = 0

    def close_last(self) -> None:
        """All pieces of the last file were taken."""
        if self.inputs and self.inputs[-1].hash is None:
            self.inputs[-1].close()

    def take(self, rows: int, digest: bytes, *, records: int, special: list[int]) -> None:
        """Count one piece of the file that was opened last."""
        state = self.inputs[-1]
        state.rows += rows
        self.rows += rows
        state.digests.append(digest)
        self.records += records
        self.special = [old + new for old, new in zip(self.special, special, strict=True)]

    def refuse(self, kind: str) -> None:
        """Count one bad row."""
        self.skipped[kind] += 1
        self.bad += 1

    def journaled(self) -> dict[str, Any]:
        """What a state record keeps: counts, and what is new of the inputs since the record before."""
        first = self._journaled_inputs
        inputs = [
            {"path": s.path, "size_bytes": s.size_bytes, "modified_ns": s.modified_ns, "rows": s.rows, "hash": s.hash}
            for s in self.inputs[first:]
        ]
        digests = self.inputs[-1].digests[self._journaled_digests :] if self.inputs else []
        return {
            "first_input": first,
            "inputs": inputs,
            "digests": b"".join(digests).hex(),
            "rows": self.rows,
            "records": self.records,
            "skipped": dict(self.skipped),
            "special": self.special,
        }

    def mark_journaled(self) -> None:
        """What `journaled` gave is on the device."""
        self._journaled_inputs = self.next_piece[0]
        self._journaled_digests = len(self.inputs[-1].digests) if self.inputs else 0

    def replay(self, record: dict[str, Any]) -> None:
        """Take over what `journaled` kept; records must come in their order."""
        first = record["first_input"]
        begun = self.inputs[first].digests if first < len(self.inputs) else []
        self.inputs[first:] = [InputState(**known) for known in record["inputs"]]
        new = bytes.fromhex(record["digests"])
        if self.inputs and self.inputs[-1].hash is None:
            # What earlier records kept counts if they spoke of this same file.
            kept = begun if first == len(self.inputs) - 1 else []
            self.inputs[-1].digests = kept + [new[i : i + 32] for i in range(0, len(new), 32)]
        self.rows = record["rows"]
        self.records = record["records"]
        self.skipped = Counter(record["skipped"])
        self.bad = self.skipped.total()
        self.special = record["special"]
        self.mark_journaled()
