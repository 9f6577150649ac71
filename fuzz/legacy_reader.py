"""The reader of older pairs (TNTIDX, fairseq's): it takes exactly what its slow twin takes, and reads the same.

The first byte chooses: raw (two bytes are the size of .bin, the rest is the .idx), or built, where the bytes become the
tables of an index that is the right size for its counts, in one of the three layouts. Only our typed errors may come
out, and only for pairs that are not sound by tests/reference/legacy.py.
"""

from __future__ import annotations

import itertools
import struct

import numpy as np

from fuzz.harness import scratch
from fuzz.index_reader import LARGEST_BIN, PATTERN, number, raw
from mdata.errors import DamageError
from mdata.indexed.legacy import LegacyReader
from tests.reference.legacy import read_legacy


def check(data: bytes) -> None:
    """One pair."""
    index, bin_bytes = built(data[1:]) if data[:1] and data[0] & 1 else raw(data[1:])
    prefix = scratch() / "old"
    prefix.with_name("old.idx").write_bytes(index)
    prefix.with_name("old.bin").write_bytes(PATTERN[:bin_bytes])
    expected = read_legacy(prefix)
    try:
        reader = LegacyReader(prefix)
    except DamageError as error:
        assert expected is None, f"a sound pair was refused: {error}"
        assert str(error).count("\n") <= 3, str(error)
        return
    assert expected is not None, "a pair that is not sound was taken"
    with reader:
        assert reader.num_documents == len(expected)
        groups = list(reader.groups())
    tokens = b"".join(group.tokens.tobytes() for group in groups)
    assert tokens == PATTERN[:bin_bytes] and sum(len(group.tokens) for group in groups) == reader.num_tokens
    lengths = np.concatenate([np.empty(0, np.int64), *(group.lengths for group in groups)]).tolist()
    assert lengths == [len(sequence) for document in expected for sequence in document]
    sizes = np.concatenate([np.empty(0, np.int64), *(np.diff(g.document_ends, prepend=0) for g in groups)]).tolist()
    assert sizes == [len(document) for document in expected]


def built(data: bytes) -> tuple[bytes, int]:
    """(.idx, bytes of .bin): an index of the right size; its tables are mostly those of the lengths."""
    values = iter(data)
    kind, code, num_items, num_boundaries = (next(values, 0) % most for most in (6, 12, 9, 9))
    unit = (1, 1, 1, 2, 4, 8, 4, 8, 2, 4, 8, 3)[code]
    lengths = [number(values, 31) for _ in range(num_items)]
    edges = [sum(lengths[:count]) * (2 if code == 6 else 1) for count in range(num_items + 1)]
    if kind & 1:
        edges = [number(values, 62) for _ in edges]
    boundaries = [number(values, 62) for _ in range(num_boundaries)]
    bin_bytes = edges[-1] * unit if not kind & 1 else int.from_bytes(bytes(itertools.islice(values, 2)), "little")
    bin_bytes = max(0, bin_bytes) % LARGEST_BIN
    if kind >= 4:
        starts = [in_range(edge * unit) for edge in edges[:-1]]
        head = struct.pack("<9sQBQ", b"MMIDIDX\0\0", 1, code, num_items)
        return head + struct.pack(f"<{num_items}i{num_items}q", *lengths, *starts), bin_bytes
    head = struct.pack("<8s5Q", b"TNTIDX\0\0", 1, code, unit, num_items, num_items)
    table = [*range(num_items + 1), *edges, *lengths]
    if kind < 2:
        head += struct.pack("<Q", num_boundaries)
        table += boundaries
    return head + struct.pack(f"<{len(table)}q", *map(in_range, table)), bin_bytes


def in_range(value: int) -> int:
    """As int64 keeps it."""
    return (value + 2**63) % 2**64 - 2**63
