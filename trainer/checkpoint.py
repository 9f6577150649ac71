"""Checkpoints: named slices of logical tensors, in safetensors, with the index committed last.

    checkpoints/step-400/rank-00000.safetensors   slices that rank 0 holds
                         index.json               every tensor's slices, sizes and hashes, the run's state
    checkpoints/latest                            "step-400"

A slice is a rectangle of a logical tensor, so any layout reads any other; padding and copies are never stored. Each
weight and moment is stored in the optimizer's own precision, therefore resuming on the same layout is bit exact.
Everything is written under a temporary folder name that is renamed when the index is on disk, and `latest` moves
after that: a crash leaves the older checkpoint whole. What a load reads is planned by `overlaps`, which is pure, and
every slice is compared with its hash before a number of it is used.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import safetensors.torch
import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mdata import DamageError, MdataError
from mdata.errors import explain_os_error, os_errors_named
from mdata.util import atomic_io
from trainer.checkpoint_folder import (
    INDEX,
    Found,
    find,
    folder_name,
    instead,
    latest,
    make_room,
    point_to,
    read_index,
    remove_old,
    run_state,
)
from trainer.checkpoint_index import (
    Index,
    Rectangle,
    RunState,
    SavedFile,
    SavedSlice,
    SavedTensor,
    dump_index,
    slice_key,
)
from trainer.collectives import Axis, gather_objects
from trainer.layout import BufferLayout

__all__ = [
    "Found",
    "Index",
    "RunState",
    "SavedSlice",
    "Shard",
    "find",
    "folder_name",
    "latest",
    "load_state",
    "overlaps",
    "read_index",
    "remove_old",
    "run_state",
    "save",
    "together",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a rank's buffers that it owns.

    Args:
        layout: of the buffers. start, stop: elements of them. owns_copies: whether this rank is the one that
            stores what all tp ranks hold copies of.
    """

    layout: BufferLayout
    start: int
    stop: int
    owns_copies: bool


def save(root: Path, run: RunState, *, shard: Shard, state: dict[str, Tensor], world: Axis) -> Path:
    """Write one checkpoint; it exists under its name when this returns, on every rank.

    Args:
        root: the run's `checkpoints` folder, seen by all ranks.
        state: name -> flat tensor of elements [shard.start, shard.stop).
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


def load_state(folder: Path, shard: Shard, *, names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Read a shard of any layout: name -> flat tensor of elements [shard.start, shard.stop), padding 0.

    Raises:
        DamageError: the checkpoint is not whole, a slice is not what was written, or a tensor's shape differs from the
            model's.
    """
    index = read_index(folder)
    reader = _Reader(folder, index)
    out = {name: torch.zeros(shard.stop - shard.start, dtype=dtype) for name in names}
    for _, wanted, first in shard.layout.slices_within(shard.start, shard.stop):
        where = slice(first - shard.start, first - shard.start + math.prod(wanted.size))
        for name in names:
            saved = index.tensors.get(f"{name}/{wanted.name}")
            if saved is None or saved.shape != wanted.shape:
                raise DamageError(
                    f"{folder} does not fit this model at {wanted.name}",
                    found="no such tensor" if saved is None else f"shape {list(saved.shape)}",
                    expected=f"shape {list(wanted.shape)}",
                    fix="use the configuration with which the checkpoint was written",
                )
            target = out[name][where].view(wanted.size)
            for piece, (start, size) in overlaps((wanted.start, wanted.size), saved.slices):
                part = reader.read(piece)[_box(start, size, piece.start)]
                target[_box(start, size, wanted.start)] = part.to(dtype)
    return out


def overlaps(wanted: Rectangle, saved: Sequence[SavedSlice]) -> Iterator[tuple[SavedSlice, Rectangle]]:
    """The parts of saved slices that lie in a wanted rectangle, in the logical tensor's coordinates."""
    for piece in saved:
        low = tuple(max(a, b) for a, b in zip(wanted[0], piece.start, strict=True))
        high = tuple(
            min(a + n, b + m) for a, n, b, m in zip(wanted[0], wanted[1], piece.start, piece.size, strict=True)
        )
        if all(a < b for a, b in zip(low, high, strict=True)):
            yield piece, (low, tuple(b - a for a, b in zip(low, high, strict=True)))


class _Reader:
    """Reads slices, each compared with its hash when it is first read; opens each file once."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self.files: dict[str, Any] = {}
        self.compared: set[tuple[str, str]] = set()

    def read(self, piece: SavedSlice) -> Tensor:
        """The whole of a slice; memory is taken for what is used of it."""
        try:
            if piece.file not in self.files:
                self.files[piece.file] = self._opened(piece.file)
            found: Tensor = self.files[piece.file].get_tensor(piece.key)
        except SafetensorError as error:
            raise self._damage(piece.file, str(error), f"a tensor {piece.key}") from error
        if tuple(found.shape) != piece.size or not found.is_floating_point():
            stands = f"{piece.key} of shape {list(found.shape)}, {found.dtype}"
            raise self._damage(piece.file, stands, f"floats of shape {list(piece.size)}")
        if piece.hash is not None and (piece.file, piece.key) not in self.compared:
            if _hash(found) != piece.hash:
                raise self._damage(piece.file, f"{piece.key} with a different hash than when it was written", None)
            self.compared.add((piece.file, piece.key))
        return found

    def _opened(self, name: str) -> Any:
        path = self.folder / name
        header = self.index.files[name].header
        with os_errors_named("reading a checkpoint"):
            if header is not None:
                with path.open("rb") as file:
                    length = min(_header_size(file.read(8)), self.index.files[name].bytes)
                    file.seek(0)
                    if blake3(file.read(length)).hexdigest() != header:
                        raise self._damage(name, "a header with a different hash than when it was written", None)
            return safe_open(path, framework="pt")

    def _damage(self, name: str, found: str, expected: str | None) -> DamageError:
        fix = instead(self.folder)
        return DamageError(f"{self.folder / name} is damaged", found=found, expected=expected, fix=fix)


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
    for spec, part, first in shard.layout.slices_within(shard.start, shard.stop):
        if spec.over_tp != "split" and not shard.owns_copies:
            continue
        where = slice(first - shard.start, first - shard.start + math.prod(part.size))
        for name, flat in state.items():
            logical = f"{name}/{part.name}"
            key = slice_key(logical, part.start)
            tensors[key] = flat[where].view(part.size).cpu()
            piece = SavedSlice(path.name, key, tuple(part.start), tuple(part.size), _hash(tensors[key]))
            before = saved[logical].slices if logical in saved else ()
            saved[logical] = SavedTensor(tuple(part.shape), (*before, piece))
    data = safetensors.torch.save(tensors)
    atomic_io.atomic_write(path, data)
    header = blake3(data[: _header_size(data[:8])]).hexdigest()
    return _Part(path.name, SavedFile(len(data), header), saved)


def _hash(tensor: Tensor) -> str:
    """Of a tensor's bytes as safetensors stores them."""
    return blake3(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _header_size(first: bytes) -> int:
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


def together(world: Axis, action: Callable[[], T], *, doing: str = "writing a checkpoint") -> list[T]:
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


def _box(start: tuple[int, ...], size: tuple[int, ...], origin: tuple[int, ...]) -> tuple[slice, ...]:
    """A rectangle as slices relative to an origin."""
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(start, size, origin, strict=True))
