"""Reading checkpoints: the slices that a rank needs, from a checkpoint of any layout.

What a load reads is planned by `overlaps`, which is pure, and every slice is compared with its hash before a number of
it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mdata import DamageError
from mdata.errors import os_errors_named
from trainer.checkpoint.folder import instead, read_index
from trainer.checkpoint.format import Index, Rectangle, SavedSlice
from trainer.checkpoint.save import header_size, tensor_hash
from trainer.optim.layout import Ownership


def load_state(folder: Path, owned: Ownership, *, names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """Read what a rank of any layout owns: name -> flat tensor of its runs, one after the other, padding 0.

    Raises:
        DamageError: the checkpoint is not whole, a slice is not what was written, or a tensor's shape differs from the
            model's.
    """
    index = read_index(folder)
    reader = _Reader(folder, index)
    out = {name: torch.zeros(owned.size, dtype=dtype) for name in names}
    for _, wanted, first in owned.slices():
        where = slice(first, first + math.prod(wanted.size))
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
            if tensor_hash(found) != piece.hash:
                raise self._damage(piece.file, f"{piece.key} with a different hash than when it was written", None)
            self.compared.add((piece.file, piece.key))
        return found

    def _opened(self, name: str) -> Any:
        path = self.folder / name
        header = self.index.files[name].header
        with os_errors_named("reading a checkpoint"):
            if header is not None:
                with path.open("rb") as file:
                    length = min(header_size(file.read(8)), self.index.files[name].bytes)
                    file.seek(0)
                    if blake3(file.read(length)).hexdigest() != header:
                        raise self._damage(name, "a header with a different hash than when it was written", None)
            return safe_open(path, framework="pt")

    def _damage(self, name: str, found: str, expected: str | None) -> DamageError:
        fix = instead(self.folder)
        return DamageError(f"{self.folder / name} is damaged", found=found, expected=expected, fix=fix)


def _box(start: tuple[int, ...], size: tuple[int, ...], origin: tuple[int, ...]) -> tuple[slice, ...]:
    """A rectangle as slices relative to an origin."""
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(start, size, origin, strict=True))
