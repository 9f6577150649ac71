"""Pairs of the older formats, written with struct alone from docs/reference/formats.md."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f8", 8: "<u2", 9: "<u4", 10: "<u8"}
FORMS = ("megatron", "merged", "fairseq", "fairseq-mmap")


def write_legacy(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], *, form: str = "megatron", code: int = 4
) -> None:
    """Write <prefix>.bin/.idx with these documents (sequences of tokens); formats without boundaries drop them."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = [len(sequence) for sequence in sequences]
    dtype = np.dtype(TYPES[code])
    unit = 4 if code == 6 else dtype.itemsize
    edges = np.cumsum([0, *lengths]) * dtype.itemsize
    boundaries = [0] if form == "merged" else np.cumsum([0, *map(len, documents)]).tolist()
    num = len(sequences)
    if form == "fairseq-mmap":
        index = struct.pack(f"<9sQBQ{num}i{num}q", b"MMIDIDX\0\0", 1, code, num, *lengths, *edges[:-1])
    else:
        counted = [] if form == "fairseq" else [len(boundaries)]
        table = [*range(num + 1), *(edges // unit), *lengths, *(boundaries if counted else [])]
        index = struct.pack(f"<8s{5 + len(counted)}Q", b"TNTIDX\0\0", 1, code, unit, num, num, *counted)
        index += struct.pack(f"<{len(table)}q", *table)
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(np.array([id for sequence in sequences for id in sequence], dtype).tobytes())
