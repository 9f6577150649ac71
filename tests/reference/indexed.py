"""Twin of mdata/indexed: a whole .bin/.idx pair as lists, and the checks of a valid pair as one predicate.

The layout is in docs/reference/formats.md.
"""

from __future__ import annotations

import struct
from pathlib import Path

ITEM = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "f", 8: "H"}


def read_pair(prefix: Path) -> tuple[list[tuple[float, ...]], list[int]] | None:
    """Return (tokens of each sequence, document boundaries), or None for an invalid pair."""
    index = Path(f"{prefix}.idx").read_bytes()
    data = Path(f"{prefix}.bin").read_bytes()
    if len(index) < 34:
        return None
    magic, version, code, num, num_boundaries = struct.unpack("<9sQBQQ", index[:34])
    if (magic, version) != (b"MMIDIDX\0\0", 1) or code not in ITEM or num_boundaries < 1:
        return None
    if len(index) != 34 + 12 * num + 8 * num_boundaries:
        return None
    table = struct.unpack(f"<{num}i{num}q{num_boundaries}q", index[34:])
    lengths, pointers, boundaries = table[:num], table[num : 2 * num], list(table[2 * num :])
    if boundaries[0] != 0 or boundaries != sorted(boundaries) or boundaries[-1] != num:
        return None
    item = struct.calcsize(ITEM[code])
    spans = [(start, start + length * item) for start, length in zip(pointers, lengths, strict=True)]
    if any(length < 0 for length in lengths) or any(start % item for start in pointers):
        return None
    ends = [0, *(end for _, end in sorted(spans)), len(data)]
    if ends[:-2] != [start for start, _ in sorted(spans)] or ends[-2] != ends[-1]:
        return None
    return [struct.unpack(f"<{(b - a) // item}{ITEM[code]}", data[a:b]) for a, b in spans], boundaries
