"""Safetensors files written tensor by tensor, without holding them: header first, then each tensor in pieces.

The safetensors library serializes models that are in memory, which a converted model is not. It reads these files. The
format: 8 bytes with the length of a JSON header, the header, then the bytes of all tensors without gaps
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from blake3 import blake3
from torch import Tensor

from mdata.util import atomic_io
from trainer.convert.links import TensorInfo

DTYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
)
TYPES: Mapping[str, torch.dtype] = MappingProxyType({name: dtype for dtype, name in DTYPES.items()})


class Written(NamedTuple):
    """A file that was written: its size, and hashes of its header and of each tensor's bytes."""

    size: int
    header: str
    tensors: Mapping[str, str]


def write_safetensors(path: Path, entries: Mapping[str, TensorInfo], *, pieces: Iterator[Tensor]) -> Written:
    """Write one file.

    Args:
        entries: its tensors, in order, with the dtype in which they are stored.
        pieces: the rows of all of them, in order, of any dtype; a piece belongs to one tensor.
    """
    header = _header(entries)
    hashes: dict[str, str] = {}
    with atomic_io.atomic_file(path) as fd:
        atomic_io.write_all(fd, header)
        size = len(header)
        for name, info in entries.items():
            left, state = math.prod(info.shape), blake3()
            while left:
                piece = next(pieces)
                data = piece.to(info.dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data
                state.update(data)
                atomic_io.write_all(fd, data)
                left, size = left - piece.numel(), size + len(data)
            assert left == 0, "pieces that cross the end of a tensor"
            hashes[name] = state.hexdigest()
    return Written(size, blake3(header).hexdigest(), hashes)


def split_by_size(entries: Mapping[str, TensorInfo], limit: int) -> list[dict[str, TensorInfo]]:
    """Tensors in order, as files of at most `limit` bytes; a tensor that is larger has a file of its own."""
    files: list[dict[str, TensorInfo]] = [{}]
    held = 0
    for name, info in entries.items():
        size = math.prod(info.shape) * info.dtype.itemsize
        if files[-1] and held + size > limit:
            files.append({})
            held = 0
        files[-1][name] = info
        held += size
    return files


def _header(entries: Mapping[str, TensorInfo]) -> bytes:
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, info in entries.items():
        size = math.prod(info.shape) * info.dtype.itemsize
        offsets: Sequence[int] = (at, at + size)
        table[name] = {"dtype": DTYPES[info.dtype], "shape": list(info.shape), "data_offsets": offsets}
        at += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
