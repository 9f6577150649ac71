"""One rank's file of a checkpoint as a stream of safetensors: the slices that the rank stores, and their hashes.

The same stream is written to a file on a disk or uploaded as an object. It can be restarted after a failed upload; the
side index describes the last pass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol

import torch
from blake3 import blake3
from torch import Tensor

from mdata.util.background import BackgroundIterator
from trainer.checkpoint.format import Part, SavedFile, SavedSlice, SavedTensor, file_of_part, slice_key
from trainer.checkpoint.tiling import Rectangle, cut
from trainer.optim.ownership import OwnedSlice
from trainer.parallel.params import is_first_copy

MAX_SLICE_BYTES = 32 << 20  # larger ones are cut, so that a reader of a part of a tensor reads little more
DTYPE_NAMES = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.uint8: "U8",
    }
)


class Owned(Protocol):
    """What a rank owns of a flat tensor of the training state: see `Ownership`."""

    @property
    def size(self) -> int:
        """Elements owned."""

    def spans(self) -> Iterator[slice]:
        """The positions of the runs in the tensor."""

    def packed(self) -> Owned:
        """The same runs, one after the other in a tensor of their own."""

    def slices(self) -> Iterator[OwnedSlice]:
        """The logical rectangles of it, and where each begins."""


@dataclass(frozen=True, slots=True)
class OwnedState:
    """The part of the training state that a rank owns.

    Args:
        owned: for each tensor of the state the runs of the buffers that lie in it.
        index: axis -> this rank's place on it, for axes along which the state is copied; the first rank stores it.
    """

    owned: Mapping[str, Owned]
    index: Mapping[str, int]


def part_name(rank: int) -> str:
    """The name of a rank's side index."""
    return f"rank-{rank:05d}.json"


class RankFile:
    """The content of a rank's file; iterating over it gives the pieces and hashes them on the way."""

    def __init__(self, rank: int, shard: OwnedState, *, state: Mapping[str, Tensor]) -> None:
        self.name = file_of_part(part_name(rank))
        self._pieces = list(_pieces(shard, state))
        self._header = _header(self._pieces)
        self.size_bytes = len(self._header) + sum(piece.values.nbytes for piece in self._pieces)
        self._part: Part | None = None

    def __iter__(self) -> Iterator[bytes | memoryview]:
        saved: dict[str, SavedTensor] = {}
        yield self._header
        with closing(_hashed(self._pieces)) as contents:
            for piece, content, digest in contents:
                yield content
                start, size = piece.box
                before = saved[piece.name].slices if piece.name in saved else ()
                entry = SavedSlice(self.name, slice_key(piece.name, start), start, size, digest)
                saved[piece.name] = SavedTensor(piece.shape, (*before, entry), DTYPE_NAMES[piece.values.dtype])
        self._part = Part(SavedFile(self.size_bytes, blake3(self._header).hexdigest()), saved)

    @property
    def part(self) -> Part:
        """The side index; known once the content has been iterated to its end."""
        assert self._part is not None, "the content comes first"
        return self._part


class _Slice(NamedTuple):
    """What becomes one slice; its values are a view of the state."""

    name: str
    shape: tuple[int, ...]
    box: Rectangle
    values: Tensor


def _pieces(shard: OwnedState, state: Mapping[str, Tensor]) -> Iterator[_Slice]:
    """The slices that this rank stores, in the order of its file."""
    for name, flat in state.items():
        for spec, part, first in shard.owned[name].slices():
            if not is_first_copy(spec.copies, shard.index.__getitem__):
                continue
            at = first
            for start, size in cut((tuple(part.start), tuple(part.size)), MAX_SLICE_BYTES // flat.element_size()):
                count = math.prod(size)
                yield _Slice(f"{name}/{part.name}", tuple(part.shape), (start, size), flat[at : at + count])
                at += count


def _hashed(pieces: Iterable[_Slice]) -> BackgroundIterator[tuple[_Slice, memoryview, str]]:
    """Each slice, its bytes in host memory and their hash, computed while the one before is written."""

    def compute(is_closed: Callable[[], bool]) -> Iterator[tuple[_Slice, memoryview, str]]:
        for piece in pieces:
            values = piece.values
            if values.is_cuda:
                values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
            content = values.reshape(-1).view(torch.uint8).numpy().data
            yield piece, content, blake3(content).hexdigest()

    return BackgroundIterator(compute, limit=1, name="checkpoint slices")


def _header(pieces: list[_Slice]) -> bytes:
    """The first bytes of a safetensors file: the length of the rest, names with types, shapes and places."""
    entries, end = {}, 0
    for piece in pieces:
        begin, end = end, end + piece.values.nbytes
        dtype = DTYPE_NAMES[piece.values.dtype]
        start, size = piece.box
        entries[slice_key(piece.name, start)] = {"dtype": dtype, "shape": size, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
