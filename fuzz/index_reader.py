"""The reader of .bin/.idx pairs: it takes exactly the pairs that its slow twin takes, and reads the same from them.

The first byte chooses: raw (two bytes are the size of .bin, the rest is the .idx), or built, where the bytes become
the fields of an index that is the right size for its counts, so that the checks behind the header are reached. Only
our typed errors may come out, and only for pairs that are not sound by tests/reference/indexed.py.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

import numpy as np

from fuzz.harness import scratch
from mdata.errors import DamageError
from mdata.indexed.reader import IndexedReader
from tests.reference.indexed import read_pair

MAGIC = b"MMIDIDX\0\0"
LARGEST_BIN = 1 << 12
PATTERN = bytes(range(256)) * (LARGEST_BIN >> 8)


def check(data: bytes) -> None:
    """One pair."""
    index, bin_bytes = built(data[1:]) if data[:1] and data[0] & 1 else raw(data[1:])
    prefix = scratch() / "pair"
    prefix.with_name("pair.idx").write_bytes(index)
    prefix.with_name("pair.bin").write_bytes(PATTERN[:bin_bytes])
    expected = read_pair(prefix)
    try:
        reader = IndexedReader(prefix)
    except DamageError as error:
        assert expected is None, f"a sound pair was refused: {error}"
        return
    assert expected is not None, "a pair that is not sound was taken"
    sequences, boundaries = expected
    assert reader.boundaries.tolist() == boundaries
    assert (reader.num_sequences, reader.num_documents) == (len(sequences), len(boundaries) - 1)
    assert reader.num_tokens == sum(map(len, sequences))
    for number, tokens in enumerate(sequences):
        found = reader.sequence(number)
        assert np.array_equal(found, np.array(tokens, reader.dtype), equal_nan=reader.dtype.kind == "f")
    if reader.contiguous:
        assert reader.tokens(0, reader.num_tokens).tobytes() == PATTERN[:bin_bytes]


def raw(data: bytes) -> tuple[bytes, int]:
    """(.idx, bytes of .bin): as they come."""
    return data[2:], int.from_bytes(data[:2], "little") % LARGEST_BIN


def built(data: bytes) -> tuple[bytes, int]:
    """(.idx, bytes of .bin): counts, code and tables of an index of the right size, values from the bytes."""
    values = iter(data)
    code, num_sequences, num_boundaries = (next(values, 0) % most for most in (10, 12, 12))
    header = struct.pack("<9sQBQQ", MAGIC, 1, code, num_sequences, num_boundaries)
    lengths = [number(values, 31) for _ in range(num_sequences)]
    pointers = [number(values, 63) for _ in range(num_sequences)]
    boundaries = [number(values, 63) for _ in range(num_boundaries)]
    table = struct.pack(f"<{num_sequences}i{num_sequences + num_boundaries}q", *lengths, *pointers, *boundaries)
    return header + table, int.from_bytes(bytes(itertools.islice(values, 2)), "little") % LARGEST_BIN


def number(values: Iterator[int], bits: int) -> int:
    """Mostly the next byte; 254 stands before a large number and 255 before a negative one."""
    first = next(values, 0)
    if first < 254:
        return first
    sign = 1 if first == 254 else -1
    return sign * ((1 << (bits - 1 - next(values, 0) % 8)) - next(values, 0))
