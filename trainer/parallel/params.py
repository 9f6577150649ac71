"""Which slices of which logical tensors a rank's parameters are made of.

A *logical* tensor is what the model's mathematics names (`blocks.0.attention.q.weight`), whole and without padding.
A *local* parameter is what one rank holds: logical pieces stacked along dim 0, then perhaps rows of padding. One
tuple of `ParamSpec` describes a rank completely; allocation, initialization, the optimizer's buffers, checkpoints
and `ranks.json` all read it. Pure: numbers in, frozen data out, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

OverTp = Literal["split", "same", "partial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rectangle of a logical tensor that lies in a local parameter.

    Args:
        name: the logical tensor.
        shape: its whole shape, without padding.
        start: first index of the rectangle in each dim.
        size: extent of the rectangle in each dim.
        row: the local parameter's row (dim 0) at which the rectangle begins.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    row: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One local parameter of one rank.

    Args:
        name: its path in the module tree.
        shape: its local shape, rows of padding included.
        pieces: what it is made of.
        std: standard deviation of its first values; 0 with fill.
        fill: the constant it starts as where std is 0.
        decay: whether weight decay applies.
        over_tp: "split": each tp rank holds other slices; "same": copies that see equal gradients; "partial": copies
            whose gradients each cover a part of the sequence and have to be summed over tp.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    std: float
    fill: float
    decay: bool
    over_tp: OverTp

    @property
    def numel(self) -> int:
        """Elements held locally, padding included."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A rectangle of a logical tensor together with its place in a flat local parameter.

    Args:
        name: the logical tensor.
        shape: its whole shape.
        start: first index of the rectangle in each dim.
        size: its extent in each dim.
        flat: number of the local parameter's element at which it begins; it is contiguous from there.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    flat: int


def slices(spec: ParamSpec, *, first: int, stop: int) -> Iterator[Slice]:
    """The logical rectangles that cover elements [first, stop) of a flat local parameter.

    A flat range cuts a matrix into at most a part of a row, whole rows, and a part of a row; padding gives nothing.
    """
    width = math.prod(spec.shape[1:])
    for piece in spec.pieces:
        base = piece.row * width
        low, high = max(first, base), min(stop, base + math.prod(piece.size))
        for start, size, offset in _row_runs(low - base, high - base, width):
            at = (piece.start[0] + start, *((piece.start[1] + offset,) if len(spec.shape) > 1 else ()))
            extent = (size // width, width) if size >= width else (1, size)
            yield Slice(
                name=piece.name,
                shape=piece.shape,
                start=at,
                size=extent if len(spec.shape) > 1 else (size // width,),
                flat=base + start * width + offset,
            )


def _row_runs(low: int, high: int, width: int) -> Iterator[tuple[int, int, int]]:
    """Cut flat elements [low, high) into (row, number of elements, column): partial row, whole rows, partial row."""
    while low < high:
        row, column = divmod(low, width)
        whole_rows = (high - low) // width
        count = whole_rows * width if column == 0 and whole_rows else min(width - column, high - low)
        yield row, count, column
        low += count
