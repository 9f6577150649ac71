"""The bytes of a .bin/.idx pair: names, header, dtype codes. The whole layout is in docs/reference/formats.md.

Everything on disk is little endian without padding. Nothing here opens a file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
LEGACY_MAGIC = b"TNTIDX\x00\x00"
VERSION = 1
HEADER_BYTES = 34
BLOCK_BYTES = 4 << 20  # of .bin under one hash; part of the manifest's format, not to be changed alone

LENGTH_DTYPE = np.dtype("<i4")
POINTER_DTYPE = np.dtype("<i8")
LARGEST_LENGTH = 2**31 - 1

DTYPES: dict[int, np.dtype[np.generic]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}

Form = Literal["Megatron's TNTIDX", "fairseq's TNTIDX", "fairseq's MMIDIDX"]
"""The older formats of pairs; mdata/indexed/legacy.py reads them."""

_HEADER = struct.Struct("<9sQBQQ")
OLD_HEADER = struct.Struct("<8s5Q")  # magic, version, code, item size, items, sizes; then Megatron's boundary count
MMAP_HEADER = struct.Struct("<9sQBQ")  # fairseq's: magic, version, code, sequences
LEGACY_HEAD_BYTES = OLD_HEADER.size + 8
_UINT16_VOCABULARY = 65500  # Megatron's limit, not 65536: the same vocabulary must give the same bytes


@dataclass(frozen=True, slots=True)
class IdxHeader:
    """The first 34 bytes of an .idx file.

    Attributes:
        magic: MAGIC in a file of this format.
        version: VERSION.
        code: a key of DTYPES.
        num_sequences: entries of the length and pointer tables.
        num_boundaries: entries of the boundary table: documents + 1.
    """

    magic: bytes
    version: int
    code: int
    num_sequences: int
    num_boundaries: int

    @property
    def index_bytes(self) -> int:
        """The size of an .idx file with this header and without modes."""
        return HEADER_BYTES + 12 * self.num_sequences + 8 * self.num_boundaries


def pack_header(dtype: np.dtype[np.generic], *, num_sequences: int, num_documents: int) -> bytes:
    """The first 34 bytes of an .idx file."""
    return _HEADER.pack(MAGIC, VERSION, dtype_code(dtype), num_sequences, num_documents + 1)


def unpack_header(data: bytes) -> IdxHeader:
    """Read the first 34 bytes of an .idx file; the values are not checked here."""
    return IdxHeader(*_HEADER.unpack(data))


def dtype_code(dtype: np.dtype[np.generic]) -> int:
    """Return the code of a dtype in the header.

    Raises:
        KeyError: the format has no code for this dtype.
    """
    return {stored: code for code, stored in DTYPES.items()}[dtype.newbyteorder("<")]


def smallest_dtype(vocab_size: int) -> np.dtype[np.generic]:
    """Megatron's choice for a tokenizer: uint16 below 65,500 entries, otherwise int32.

    Args:
        vocab_size: the tokenizer's entries, with added tokens, without padding.
    """
    return np.dtype("<u2" if vocab_size < _UINT16_VOCABULARY else "<i4")


def bin_path(prefix: Path) -> Path:
    """The .bin of a prefix; a dot in the prefix is part of its name."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """The .idx of a prefix; a dot in the prefix is part of its name."""
    return prefix.with_name(prefix.name + ".idx")


def legacy_form(head: bytes, size: int) -> Form | None:
    """The older format of an .idx with this size, by its first 56 bytes; None: none of them."""
    if head.startswith(LEGACY_MAGIC) and len(head) >= OLD_HEADER.size:
        _, _, _, _, items, sizes = OLD_HEADER.unpack_from(head)
        return "fairseq's TNTIDX" if size == 8 * (6 + 2 * (items + 1) + sizes) else "Megatron's TNTIDX"
    if head.startswith(LEGACY_MAGIC):
        return "Megatron's TNTIDX"
    if head.startswith(MAGIC) and len(head) >= MMAP_HEADER.size:
        return "fairseq's MMIDIDX" if size == MMAP_HEADER.size + 12 * MMAP_HEADER.unpack_from(head)[3] else None
    return None
