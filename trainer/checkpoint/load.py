"""Reading checkpoints: the slices that a rank needs, from a checkpoint of any layout, in one pass over each file.

What a load reads is planned by `overlaps`, which is pure. Slices are read in the order of the files, each once, in
blocks of a few megabytes, and each is compared with its hash: memory is what is loaded and a block, however large the
slices are. A slice is compared when its last block was read, so a caller has nothing of a damaged one: it gets an
error. `verify_checkpoint` compares every byte; `find_valid` looks for the newest checkpoint that passes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mdata import DamageError, MdataError, UsageError
from mdata.errors import few, os_errors_named
from trainer.checkpoint.folder import Found, find_checkpoint, instead, read_index, step_of, whole_checkpoints
from trainer.checkpoint.format import Index, SavedSlice
from trainer.checkpoint.save import DTYPE_NAMES, Owned
from trainer.checkpoint.tiling import Rectangle, cut

BLOCK_BYTES = 8 << 20
_TORCH = MappingProxyType({name: dtype for dtype, name in DTYPE_NAMES.items()})


class _Copy(NamedTuple):
    """A part of a slice, in the logical tensor's coordinates, and the rectangle of the result that it lies in."""

    part: Rectangle
    target: Tensor
    origin: tuple[int, ...]


def load_state(folder: Path, owned: Mapping[str, Owned], *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read what a rank of any layout owns: name -> flat tensor of its runs, one after the other, padding 0.

    Args:
        owned: the runs that each tensor of the state is made of, by its name.

    Raises:
        DamageError: the checkpoint is not whole, or a slice is not what was written.
        UsageError: the model's tensors are not those of the checkpoint; names them.
    """
    index = read_index(folder)
    check_fits(folder, index, owned=owned)
    out = {name: torch.zeros(runs.size, dtype=dtype) for name, runs in owned.items()}
    plan: dict[str, dict[SavedSlice, list[_Copy]]] = {}
    for name, runs in owned.items():
        for _, wanted, first in runs.slices():
            target = out[name][first : first + math.prod(wanted.size)].view(wanted.size)
            for piece, part in overlaps((wanted.start, wanted.size), index.tensors[f"{name}/{wanted.name}"].slices):
                plan.setdefault(piece.file, {}).setdefault(piece, []).append(_Copy(part, target, wanted.start))
    reader = _Reader(folder, index)
    for file, wanted_of_file in sorted(plan.items()):
        reader.read(file, wanted_of_file)
    _check_extras(folder, index)
    return out


def check_fits(folder: Path, index: Index, *, owned: Mapping[str, Owned]) -> None:
    """See that every tensor that is wanted is there in its shape.

    Raises:
        UsageError: some are not; names them.
    """
    wrong: dict[str, str] = {}
    expected: dict[str, str] = {}
    for name, runs in owned.items():
        for _, wanted, _ in runs.slices():
            key = f"{name}/{wanted.name}"
            saved = index.tensors.get(key)
            if saved is None or saved.shape != tuple(wanted.shape):
                # The weight's name alone where the weight itself does not fit.
                shown = wanted.name if name == "weight" or wanted.name in wrong else key
                wrong.setdefault(shown, "no such tensor" if saved is None else f"shape {list(saved.shape)}")
                expected.setdefault(shown, f"shape {list(wanted.shape)}")
    if wrong:
        first = next(iter(wrong))
        raise UsageError(
            f"{folder} does not fit this model at {few(list(wrong), 4)}",
            found=wrong[first],
            expected=f"{expected[first]}" + (f" of {first}" if len(wrong) > 1 else ""),
            fix="use the configuration with which the checkpoint was written",
        )


def overlaps(wanted: Rectangle, saved: Sequence[SavedSlice]) -> Iterator[tuple[SavedSlice, Rectangle]]:
    """The parts of saved slices that lie in a wanted rectangle, in the logical tensor's coordinates."""
    for piece in saved:
        if common := intersection(wanted, (piece.start, piece.size)):
            yield piece, common


def verify_checkpoint(folder: Path) -> Index:
    """Compare every byte of a checkpoint with its hash; its index.

    Raises:
        DamageError: the first file that is not what was written. UsageError: there is no checkpoint.
    """
    index = read_index(folder)
    _check_extras(folder, index)
    reader = _Reader(folder, index)
    slices: dict[str, dict[SavedSlice, list[_Copy]]] = {name: {} for name in index.files}
    for tensor in index.tensors.values():
        for piece in tensor.slices:
            slices[piece.file][piece] = []
    for file, wanted in slices.items():
        reader.read(file, wanted)
    return index


def find_valid(root: Path) -> Found:
    """As `find_checkpoint`, but one whose every byte was compared; damaged ones are passed over, which is told.

    Raises:
        DamageError: there are checkpoints and none is valid.
    """
    named = find_checkpoint(root)
    if named.folder is None:
        return named
    # A later one may be of a curve that this run has left.
    others = [path for path in whole_checkpoints(root) if step_of(path) < step_of(named.folder)]
    told = [named.warning] if named.warning else []
    first: MdataError | None = None
    for folder in (named.folder, *others):
        try:
            verify_checkpoint(folder)
        except MdataError as error:
            first = first or error
            told.append(str(error).splitlines()[0])
        else:
            told += [f"using {folder.name}, the newest valid checkpoint"] if folder != named.folder else []
            return Found(folder, "; ".join(told) or None)
    assert first is not None, "the named checkpoint was tried"
    raise first


class _Entry(NamedTuple):
    """A tensor of a safetensors file: where its bytes are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    bytes: int


class _Reader:
    """Reads slices of a checkpoint's files, each compared with its hash."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self.block = bytearray()

    def read(self, name: str, wanted: Mapping[SavedSlice, Sequence[_Copy]]) -> None:
        """Read slices of one file in the order in which they lie there, and copy what is wanted of each."""
        with os_errors_named("reading a checkpoint"), (self.folder / name).open("rb", buffering=0) as file:
            entries = self._entries(name, file.fileno())
            for piece in wanted:
                self._check_entry(piece, entries.get(piece.key))
            for piece in sorted(wanted, key=lambda piece: entries[piece.key].begin):
                self._read_slice(file.fileno(), piece, entries[piece.key], wanted[piece])

    def _read_slice(self, fd: int, piece: SavedSlice, entry: _Entry, copies: Sequence[_Copy]) -> None:
        seen, at = blake3(), entry.begin
        for box in cut((piece.start, piece.size), max(1, BLOCK_BYTES // entry.dtype.itemsize)):
            count = math.prod(box[1]) * entry.dtype.itemsize
            content = self._bytes(fd, at, count, name=piece.file)
            at += count
            if piece.hash is not None:
                seen.update(content)
            values = torch.frombuffer(content, dtype=entry.dtype).view(box[1])
            for copy in copies:
                if common := intersection(copy.part, box):
                    start, size = common
                    copy.target[_box(start, size, copy.origin)] = values[_box(start, size, box[0])].to(
                        copy.target.dtype
                    )
        if piece.hash is not None and seen.hexdigest() != piece.hash:
            raise self._damage(piece.file, f"{piece.key} with a different hash than when it was written", None)

    def _bytes(self, fd: int, at: int, count: int, *, name: str) -> memoryview:
        """Bytes of a file, in the block that the next call uses again."""
        if len(self.block) < count:
            self.block = bytearray(count)
        view, done = memoryview(self.block)[:count], 0
        while done < count:
            got = os.preadv(fd, [view[done:]], at + done)
            if got == 0:
                raise self._damage(name, "a file that became shorter while it was read", None)
            done += got
        return view

    def _entries(self, name: str, fd: int) -> dict[str, _Entry]:
        """What the file's header says, once it is known to be what was written, and sound."""
        saved = self.index.files[name]
        length = 8 + int.from_bytes(os.pread(fd, 8, 0), "little")
        header = os.pread(fd, min(length, saved.bytes), 0)
        if saved.header is not None and blake3(header).hexdigest() != saved.header:
            raise self._damage(name, "a header with a different hash than when it was written", None)
        try:
            with safe_open(self.folder / name, framework="pt"):
                found = json.loads(header[8:])
        except (SafetensorError, ValueError, RecursionError) as error:
            raise self._damage(name, str(error), "a header of safetensors") from error
        return {
            key: _Entry(
                _TORCH.get(entry["dtype"], torch.bool),
                tuple(entry["shape"]),
                length + entry["data_offsets"][0],
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for key, entry in found.items()
            if key != "__metadata__"
        }

    def _check_entry(self, piece: SavedSlice, entry: _Entry | None) -> None:
        if entry is None:
            raise self._damage(piece.file, "no such tensor", f"a tensor {piece.key}")
        floats = entry.dtype.is_floating_point
        if entry.shape != piece.size or not floats or entry.bytes != math.prod(piece.size) * entry.dtype.itemsize:
            stands = f"{piece.key} of shape {list(entry.shape)}, {entry.dtype}"
            raise self._damage(piece.file, stands, f"floats of shape {list(piece.size)}")

    def _damage(self, name: str, found: str, expected: str | None) -> DamageError:
        fix = instead(self.folder)
        return DamageError(f"{self.folder / name} is damaged", found=found, expected=expected, fix=fix)


def _check_extras(folder: Path, index: Index) -> None:
    for name, file in index.extras.items():
        with os_errors_named("reading a checkpoint"):
            content = (folder / name).read_bytes()
        if blake3(content).hexdigest() != file.hash:
            found = "a different hash than when it was written"
            raise DamageError(f"{folder / name} is damaged", found=found, fix=instead(folder))


def intersection(a: Rectangle, b: Rectangle) -> Rectangle | None:
    """What two rectangles share; None: nothing."""
    low = tuple(map(max, a[0], b[0]))
    high = tuple(min(x + n, y + m) for x, n, y, m in zip(*a, *b, strict=True))
    return (low, tuple(y - x for x, y in zip(low, high, strict=True))) if all(map(int.__lt__, low, high)) else None


def _box(start: tuple[int, ...], size: tuple[int, ...], origin: tuple[int, ...]) -> tuple[slice, ...]:
    """A rectangle as slices relative to an origin."""
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(start, size, origin, strict=True))
