"""Writing checkpoints: named slices of logical tensors, in safetensors, with the index committed last.

    checkpoints/step-400/rank-00000.safetensors   slices that rank 0 holds
                         index.json               every tensor's slices, sizes and hashes, the run's state
    checkpoints/latest                            "step-400"

A slice is a rectangle of a logical tensor, so any layout reads any other; padding and copies are never stored. Each
weight and moment is stored in the optimizer's own precision, therefore resuming on the same layout is bit exact.
Everything is written under a temporary folder name that is renamed when the index is on disk, and `latest` moves
after that: a crash leaves the older checkpoint whole.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import safetensors.torch
import torch
from blake3 import blake3
from torch import Tensor

from mdata import MdataError
from mdata.errors import explain_os_error
from mdata.util import atomic_io
from trainer.checkpoint.folder import INDEX, folder_name, make_room, point_to
from trainer.checkpoint.format import Index, RunState, SavedFile, SavedSlice, SavedTensor, dump_index, slice_key
from trainer.optim.layout import Ownership
from trainer.parallel.collectives import Group, gather_objects
from trainer.parallel.params import is_first_copy

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the training state that a rank owns.

    Args:
        owned: runs of the buffers, one after the other in each tensor of the state.
        index: axis -> this rank's place on it, for the axes along which there are copies; the first stores them.
    """

    owned: Ownership
    index: Mapping[str, int]


def save_checkpoint(root: Path, run: RunState, *, shard: Shard, state: dict[str, Tensor], world: Group) -> Path:
    """Write one checkpoint; it exists under its name when this returns, on every rank.

    Args:
        root: the run's `checkpoints` folder, seen by all ranks.
        state: name -> flat tensor of the owned runs.
        world: the axis of all ranks.

    Raises:
        MdataError: a rank could not write; no rank goes on, nothing that looks finished is left.
    """
    final = root / folder_name(run.step)
    partial = atomic_io.partial_path(final)
    lead = world.rank == 0
    try:
        together(world, lambda: _prepare(partial) if lead else None)
        path = partial / f"rank-{world.rank:05d}.safetensors"
        parts = together(world, lambda: _write_slices(path, shard, state))
        together(world, lambda: _commit(root, partial, final, _merged(run, parts)) if lead else None)
    except BaseException:
        if lead:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank wrote, for the index."""

    name: str
    file: SavedFile
    tensors: dict[str, SavedTensor]


def _write_slices(path: Path, shard: Shard, state: dict[str, Tensor]) -> _Part:
    """Write this rank's slices."""
    tensors: dict[str, Tensor] = {}
    saved: dict[str, SavedTensor] = {}
    for spec, part, first in shard.owned.slices():
        if not is_first_copy(spec.copies, shard.index.__getitem__):
            continue
        where = slice(first, first + math.prod(part.size))
        for name, flat in state.items():
            logical = f"{name}/{part.name}"
            key = slice_key(logical, part.start)
            tensors[key] = flat[where].view(part.size).cpu()
            piece = SavedSlice(path.name, key, tuple(part.start), tuple(part.size), tensor_hash(tensors[key]))
            before = saved[logical].slices if logical in saved else ()
            saved[logical] = SavedTensor(tuple(part.shape), (*before, piece))
    data = safetensors.torch.save(tensors)
    atomic_io.atomic_write(path, data)
    header = blake3(data[: header_size(data[:8])]).hexdigest()
    return _Part(path.name, SavedFile(len(data), header), saved)


def tensor_hash(tensor: Tensor) -> str:
    """Of a tensor's bytes as safetensors stores them."""
    return blake3(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def header_size(first: bytes) -> int:
    """Bytes before the first tensor of a file: its first eight hold how many follow them."""
    return 8 + int.from_bytes(first, "little")


def _prepare(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _merged(run: RunState, parts: Sequence[_Part]) -> Index:
    tensors: dict[str, SavedTensor] = {}
    for part in parts:
        for name, entry in part.tensors.items():
            before = tensors[name].slices if name in tensors else ()
            tensors[name] = SavedTensor(entry.shape, (*before, *entry.slices))
    return Index(run, {part.name: part.file for part in parts}, tensors, hashed=True)


def _commit(root: Path, partial: Path, final: Path, index: Index) -> None:
    atomic_io.atomic_write(partial / INDEX, dump_index(index))
    make_room(final)
    atomic_io.rename(partial, final)
    atomic_io.sync_folder(root)
    point_to(final)


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
