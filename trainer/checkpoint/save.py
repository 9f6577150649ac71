"""Writing checkpoints: named slices of logical tensors, in safetensors, with the index committed last.

    checkpoints/step-400/rank-00000.safetensors   slices that rank 0 holds
                         rank-00000.json          side index: their places, types and hashes
                         tokenizer/...            as in the run folder
                         index.json               names and hashes of all of these, the run's state
    checkpoints/latest                            "step-400"

A slice is a rectangle of a logical tensor, so any layout reads any other; padding and copies are never stored. Each
weight and moment is stored in the optimizer's own precision, therefore resuming on the same layout is bit exact.
Each rank streams its slices into a temporary folder and writes its side index last. When all of those are there, rank 0
verifies, writes the index and renames the folder; it needs to see files only, so that nothing here is a collective.
`latest` moves after that: a crash leaves the older checkpoint whole.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeVar, cast

import torch
from blake3 import blake3
from torch import Tensor

from mdata import MdataError, ResourceError
from mdata.errors import explain_os_error
from mdata.util import atomic_io
from mdata.util.background import BackgroundIterator
from trainer.checkpoint.folder import INDEX, check_partial, folder_name, make_room, partial_folder, point_to
from trainer.checkpoint.format import (
    HashedFile,
    Part,
    RunState,
    SavedFile,
    SavedSlice,
    SavedTensor,
    dump_index,
    dump_part,
    file_of_part,
    slice_key,
)
from trainer.checkpoint.tiling import Rectangle, cut
from trainer.errors import size_text
from trainer.optim.layout import OwnedSlice
from trainer.parallel.collectives import Group, gather_objects
from trainer.parallel.params import is_first_copy

T = TypeVar("T")
MAX_SLICE_BYTES = 32 << 20  # larger ones are cut, so that who needs a part of a tensor reads little more
SYNC_BYTES = 64 << 20  # are put on the device at a time, beside the writing; smaller requests took longer
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
    """What a rank owns of the training state: `Ownership`, or several of them one after the other."""

    @property
    def size(self) -> int:
        """Elements of each flat tensor of the state."""

    def slices(self) -> Iterator[OwnedSlice]:
        """The logical rectangles of it, and where each begins."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the training state that a rank owns.

    Args:
        owned: for each tensor of the state the runs of the buffers that lie in it, one after the other.
        index: axis -> this rank's place on it, for the axes along which there are copies; the first stores them.
    """

    owned: Mapping[str, Owned]
    index: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Target:
    """Where one save goes.

    Args:
        root: the run's `checkpoints` folder, seen by all ranks.
        run: where the run is. attempt: letters and digits that no other save of this root has; equal on all ranks.
        extras: further files, such as the tokenizer's, by name.
        total_bytes: of all ranks' slices; 0: not known.
    """

    root: Path
    run: RunState
    attempt: str
    extras: Mapping[str, bytes] = field(default_factory=dict)
    total_bytes: int = 0

    @property
    def partial(self) -> Path:
        """The temporary folder."""
        return partial_folder(self.root, self.run.step, attempt=self.attempt)

    @property
    def final(self) -> Path:
        """The checkpoint's folder."""
        return self.root / folder_name(self.run.step)


def save_checkpoint(target: Target, shard: Shard, *, state: Mapping[str, Tensor], world: Group) -> Path:
    """Write one checkpoint; it exists under its name when this returns, on every rank.

    Args:
        state: name -> flat tensor of its owned runs.
        world: the axis of all ranks.

    Raises:
        MdataError: a rank could not write; no rank goes on, nothing that looks finished is left.
    """
    try:
        together(world, lambda: write_part(target, world.rank, shard=shard, state=state))
        together(world, lambda: commit(target, world.size) if world.rank == 0 else None)
    except BaseException:
        discard(target, world.rank)
        raise
    return target.final


def write_part(target: Target, rank: int, *, shard: Shard, state: Mapping[str, Tensor]) -> None:
    """Write one rank's slices, and then its side index.

    Raises:
        ResourceError: there is less room than all ranks need (rank 0 looks). OSError: what the file system said.
    """
    folder, name = target.partial, part_name(rank)
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        check_room(target.root, target.total_bytes)
    pieces = list(_pieces(shard, state))
    header = _header(pieces)
    saved: dict[str, SavedTensor] = {}
    path = folder / file_of_part(name)
    with closing(_hashed(pieces)) as contents, atomic_io.atomic_file(path) as fd:
        atomic_io.write_all(fd, header)
        size_bytes = begun = len(header)
        for piece, content, digest in contents:
            atomic_io.write_all(fd, content)
            size_bytes += len(content)
            if size_bytes - begun >= SYNC_BYTES:
                atomic_io.sync_soon(fd, begun, count=size_bytes - begun)
                begun = size_bytes
            start, size = piece.box
            before = saved[piece.name].slices if piece.name in saved else ()
            entry = SavedSlice(path.name, slice_key(piece.name, start), start, size, digest)
            saved[piece.name] = SavedTensor(piece.shape, (*before, entry), DTYPE_NAMES[piece.values.dtype])
    part = Part(SavedFile(size_bytes, blake3(header).hexdigest()), saved)
    atomic_io.atomic_write(folder / name, dump_part(part))


def commit(target: Target, num_ranks: int) -> None:
    """Make a checkpoint of what all ranks have written: verify, name it, and let `latest` name it.

    Raises:
        DamageError: what is there is not what was written. OSError: what the file system said.
    """
    partial = target.partial
    parts = {}
    for name in map(part_name, range(num_ranks)):
        content = (partial / name).read_bytes()
        parts[name] = HashedFile(len(content), blake3(content).hexdigest())
    extras = {name: HashedFile(len(content), blake3(content).hexdigest()) for name, content in target.extras.items()}
    for name, content in target.extras.items():
        (partial / name).parent.mkdir(exist_ok=True)
        atomic_io.atomic_write(partial / name, content)
    atomic_io.atomic_write(partial / INDEX, dump_index(target.run, parts, extras=extras))
    check_partial(partial)
    make_room(target.final)
    atomic_io.rename(partial, target.final)
    atomic_io.sync_folder(target.root)
    point_to(target.final)


def missing_parts(target: Target, num_ranks: int) -> list[int]:
    """The ranks whose side index is not there yet."""
    return [rank for rank in range(num_ranks) if not (target.partial / part_name(rank)).exists()]


def discard(target: Target, rank: int) -> None:
    """Take away what was written, on rank 0."""
    if rank == 0:
        shutil.rmtree(target.partial, ignore_errors=True)


def check_room(root: Path, needed_bytes: int) -> None:
    """See that a checkpoint fits beside those that are there.

    Raises:
        ResourceError: it does not.
    """
    free = shutil.disk_usage(next(path for path in (root, *root.parents) if path.exists())).free
    if free < needed_bytes:
        raise ResourceError(
            f"a checkpoint does not fit into {root}",
            found=f"{size_text(free)} free",
            expected=f"{size_text(needed_bytes)}",
            fix="free some disk space, lower checkpoint.keep, or use a run.folder on another file system",
        )


def part_name(rank: int) -> str:
    """The name of a rank's side index."""
    return f"rank-{rank:05d}.json"


class _Piece(NamedTuple):
    """What becomes one slice; its values are a view of the state."""

    name: str
    shape: tuple[int, ...]
    box: Rectangle
    values: Tensor


def _pieces(shard: Shard, state: Mapping[str, Tensor]) -> Iterator[_Piece]:
    """The slices that this rank stores, in the order of its file."""
    for name, flat in state.items():
        for spec, part, first in shard.owned[name].slices():
            if not is_first_copy(spec.copies, shard.index.__getitem__):
                continue
            at = first
            for start, size in cut((tuple(part.start), tuple(part.size)), MAX_SLICE_BYTES // flat.element_size()):
                count = math.prod(size)
                yield _Piece(f"{name}/{part.name}", tuple(part.shape), (start, size), flat[at : at + count])
                at += count


def _hashed(pieces: Iterable[_Piece]) -> BackgroundIterator[tuple[_Piece, memoryview, str]]:
    """Each slice, its bytes in host memory and their hash, computed while the one before is written."""

    def compute(is_closed: Callable[[], bool]) -> Iterator[tuple[_Piece, memoryview, str]]:
        for piece in pieces:
            values = piece.values
            if values.is_cuda:
                values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
            content = values.reshape(-1).view(torch.uint8).numpy().data
            yield piece, content, blake3(content).hexdigest()

    return BackgroundIterator(compute, limit=1, name="checkpoint slices")


def _header(pieces: list[_Piece]) -> bytes:
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


def together(world: Group, action: Callable[[], T], *, doing: str = "writing a checkpoint") -> list[T]:
    """Do something on every rank; if one fails all raise its error, so that none waits for one that gave up."""
    outcome: T | MdataError
    try:
        outcome = action()
    except OSError as error:
        outcome = explain_os_error(error, f"rank {world.rank} {doing}")
    except MdataError as error:
        outcome = error
    values = gather_objects(outcome, world)
    for value in values:
        if isinstance(value, MdataError):
            raise value
    return cast(list[T], values)
