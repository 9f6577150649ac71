"""The slow readable twin of preprocessing: one document at a time, Python lists, and struct."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from mdata.tokenizers.base.tokenizer import Tokenizer


def documents_of(
    path: Path, tokenizer: Tokenizer, *, key: str = "text", eod: int | None = None
) -> list[list[list[int]]]:
    """The sequences of ids of each line of a text file."""
    documents = []
    with path.open(encoding="utf-8") as lines:  # Python's universal newlines
        for line in lines:
            value = json.loads(line)[key]
            sentences = [
                tokenizer.encode_batch([text])[0].tolist() for text in ([value] if isinstance(value, str) else value)
            ]
            sequences = [ids for ids in sentences if ids]
            if sequences and eod is not None:
                sequences[-1].append(eod)
            documents.append(sequences)
    return documents


def pair_of(documents: list[list[list[int]]], *, code: int) -> tuple[bytes, bytes]:
    """The bytes of .bin and .idx."""
    letter, size = {8: ("H", 2), 4: ("i", 4)}[code]
    sequences = [ids for document in documents for ids in document]
    lengths = [len(ids) for ids in sequences]
    pointers = [sum(lengths[:i]) * size for i in range(len(lengths))]
    boundaries = [0]
    for document in documents:
        boundaries.append(boundaries[-1] + len(document))
    flat = [id for ids in sequences for id in ids]
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(boundaries))
    index += struct.pack(f"<{len(lengths)}i{len(lengths)}q{len(boundaries)}q", *lengths, *pointers, *boundaries)
    return struct.pack(f"<{len(flat)}{letter}", *flat), index
