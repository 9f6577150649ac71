"""Twin of mdata/indexed/legacy.py: a whole pair of an older format as lists, or None if it is invalid.

The layouts are in docs/reference/formats.md, "Older formats".
"""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

ITEM = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 6: "d", 7: "d", 8: "H", 9: "I", 10: "Q"}


def read_legacy(prefix: Path) -> list[list[tuple[float, ...]]] | None:
    """The sequences of each document; without known boundaries each sequence is a document."""
    index, data = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    found = _old(index) if index.startswith(b"TNTIDX\0\0") else _fairseq_mmap(index, len(data))
    if found is None:
        return None
    code, lengths, edges, boundaries = found
    item = struct.calcsize(ITEM[code])
    if any(length < 0 for length in lengths) or edges[0] != 0 or edges[-1] != len(data):
        return None
    if [b - a for a, b in pairwise(edges)] != [length * item for length in lengths]:
        return None
    if not boundaries or (boundaries == [0] and lengths):
        boundaries = list(range(len(lengths) + 1))
    if boundaries[0] != 0 or boundaries != sorted(boundaries) or boundaries[-1] != len(lengths):
        return None
    sequences = [struct.unpack(f"<{(b - a) // item}{ITEM[code]}", data[a:b]) for a, b in pairwise(edges)]
    return [sequences[a:b] for a, b in pairwise(boundaries)]


_Index = tuple[int, list[int], list[int], list[int]]  # code, lengths, edges in bytes, boundaries


def _old(index: bytes) -> _Index | None:
    if len(index) < 48:
        return None
    version, code, unit, num, sizes = struct.unpack("<5Q", index[8:48])
    at, num_boundaries = 48, 0
    if len(index) != 8 * (6 + 2 * (num + 1) + sizes):
        num_boundaries = int.from_bytes(index[48:56], "little")
        at = 56
        if len(index) != 8 * (7 + 2 * (num + 1) + sizes + num_boundaries) or not num_boundaries:
            return None
    if version != 1 or code not in ITEM or sizes != num:
        return None
    if unit not in ((4, 8) if code in (6, 7) else (struct.calcsize(ITEM[code]),)):
        return None
    table = list(struct.unpack(f"<{(len(index) - at) // 8}q", index[at:]))
    dimensions, table = table[: num + 1], table[num + 1 :]
    edges, lengths, boundaries = table[: num + 1], table[num + 1 : 2 * num + 1], table[2 * num + 1 :]
    return None if dimensions != list(range(num + 1)) else (code, lengths, [edge * unit for edge in edges], boundaries)


def _fairseq_mmap(index: bytes, bin_bytes: int) -> _Index | None:
    if len(index) < 26:
        return None
    magic, version, code, num = struct.unpack("<9sQBQ", index[:26])
    if (magic, version) != (b"MMIDIDX\0\0", 1) or code not in ITEM or len(index) != 26 + 12 * num:
        return None
    table = struct.unpack(f"<{num}i{num}q", index[26:])
    return code, list(table[:num]), [*table[num:], bin_bytes], []
