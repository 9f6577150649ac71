"""Declares which box of one tensor equals which box of another, as data that works in both directions.

A `Link` joins a box of one of our logical tensors to a box of a tensor of another project. Both are written as einops
writes shapes: "(group slot channel) width" is a matrix whose rows are a product of three axes. Concatenation, stacking
of layers, transposition, interleaving and padding are all of this form, so one table per format serves for import and
export. `Linked` shows the tensors of one side of a table, read lazily from the other: any rectangle, without the rest.
Pure but for `Linked.read`, which moves elements and never computes with them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.checkpoint.tiling import Rectangle
from trainer.parallel.params import rectangles

Ranges = Mapping[str, tuple[int, int]]  # axis -> (first, count)


class TensorInfo(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(Protocol):
    """Named tensors, of which any rectangle can be read."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """All of them."""

    def read(self, name: str, box: Rectangle) -> Tensor:
        """The elements of one rectangle, (start, size); of the size, on the CPU."""


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    """One axis inside a dim: elements [first, first + length) of `extent` take part in the link."""

    axis: str
    first: int
    length: int
    extent: int


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """A tensor whose dims are products of axes, slowest first."""

    tensor: str
    dims: tuple[tuple[Factor, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(math.prod(factor.extent for factor in dim) for dim in self.dims)

    def axes(self) -> list[str]:
        """In order."""
        return [factor.axis for dim in self.dims for factor in dim]


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """A box of one of our tensors that equals a box of one of theirs; an axis of one side only has length 1."""

    ours: Side
    theirs: Side

    def flipped(self) -> Link:
        """The same link, seen from the other side."""
        return Link(self.theirs, self.ours)


def link(
    ours: tuple[str, str],
    theirs: tuple[str, str],
    *,
    lengths: Mapping[str, int],
    ours_in: Ranges | None = None,
    theirs_in: Ranges | None = None,
) -> Link:
    """A link from its notation.

    Args:
        ours, theirs: (name of the tensor, its dims, such as "(head channel) width").
        lengths: elements of each axis that the link covers; 1 for axes that are not named.
        ours_in, theirs_in: axis -> (first, extent) if that side has more elements than the link covers.
    """
    return Link(*(_side(*side, lengths, inside or {}) for side, inside in ((ours, ours_in), (theirs, theirs_in))))


def _side(tensor: str, notation: str, lengths: Mapping[str, int], inside: Ranges) -> Side:
    dims: list[tuple[Factor, ...]] = []
    factors: list[Factor] | None = None
    for word in notation.replace("(", " ( ").replace(")", " ) ").split():
        if word == "(":
            factors = []
        elif word == ")":
            dims.append(tuple(factors or ()))
            factors = None
        else:
            length = lengths.get(word, 1)
            first, extent = inside.get(word, (0, length))
            factor = Factor(word, first, length, extent)
            if factors is None:
                dims.append((factor,))
            else:
                factors.append(factor)
    return Side(tensor, tuple(dims))


class Linked:
    """The tensors on our side of links, read from a source of those on their side.

    Args:
        source: has the other side's tensors.
        links: all links; the sides must not overlap. What no link covers is 0: rows of padding.
        dtype: of what is read; None: that of the first tensor that a link names.
    """

    def __init__(self, source: Source, links: Iterable[Link], *, dtype: torch.dtype | None = None) -> None:
        self._source = source
        self._links: dict[str, list[Link]] = defaultdict(list)
        for link in links:
            self._links[link.ours.tensor].append(link)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(tensor_links[0].ours.shape, dtype or source.tensors[tensor_links[0].theirs.tensor].dtype)
            for name, tensor_links in self._links.items()
        }

    def read(self, name: str, box: Rectangle) -> Tensor:
        """See `Source`."""
        out = torch.zeros(box[1], dtype=self.tensors[name].dtype)
        for link in self._links[name]:
            _fill_(out, link, source=self._source, start=box[0])
        return out


class Watched:
    """A source that records which tensors may hold values that are not finite."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.suspects: dict[str, None] = {}  # in the order of reading

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """See `Source`."""
        return self._source.tensors

    def read(self, name: str, box: Rectangle) -> Tensor:
        """See `Source`."""
        piece = self._source.read(name, box)
        # One NaN or infinite value makes the sum one; a sum that overflows is counted again by the caller.
        wide = torch.promote_types(piece.dtype, torch.float32)
        if name not in self.suspects and not piece.sum(dtype=wide).isfinite():
            self.suspects[name] = None
        return piece


def _fill_(out: Tensor, link: Link, *, source: Source, start: Sequence[int]) -> None:
    """Copy a link's elements into the rectangle of its first side that begins at `start`."""
    parts = [
        list(_parts(dim, low, low + count)) for dim, low, count in zip(link.ours.dims, start, out.shape, strict=True)
    ]
    shared = set(link.ours.axes()) & set(link.theirs.axes())
    for chosen in itertools.product(*parts):
        ranges = {axis: axis_range for part in chosen for axis, axis_range in part.ranges.items()}
        target = _target(out, chosen, link.ours, shared=shared, start=start)
        block, names = _block(link.theirs, ranges, source)
        order = [names.index(axis) for axis in link.ours.axes() if axis in shared]
        target.copy_(block.permute(order))


class _DimBox(NamedTuple):
    """A box inside one dim: elements [low, low + prod(sizes)) of it, and of those the ranges of each axis."""

    low: int
    sizes: tuple[int, ...]
    skipped: tuple[int, ...]
    ranges: Ranges


def _parts(dim: tuple[Factor, ...], low: int, high: int) -> Iterator[_DimBox]:
    """Elements [low, high) of a dim as boxes of its axes, cut to what the link is about."""
    for start, size, flat in rectangles(tuple(factor.extent for factor in dim), low, high=high):
        ranges, skipped = {}, []
        for factor, first, count in zip(dim, start, size, strict=True):
            begin = max(first, factor.first)
            ranges[factor.axis] = (begin - factor.first, min(first + count, factor.first + factor.length) - begin)
            skipped.append(begin - first)
        if all(count > 0 for _, count in ranges.values()):
            yield _DimBox(flat, size, tuple(skipped), ranges)


def _target(out: Tensor, chosen: Sequence[_DimBox], side: Side, *, shared: set[str], start: Sequence[int]) -> Tensor:
    """The view of `out` with one dim for each shared axis."""
    shape: list[int] = []
    inner: list[slice | int] = []
    for dim, (part, low) in enumerate(zip(chosen, start, strict=True)):
        out = out.narrow(dim, part.low - low, math.prod(part.sizes))
        shape += part.sizes
        for factor, skipped in zip(side.dims[dim], part.skipped, strict=True):
            count = part.ranges[factor.axis][1]
            inner.append(slice(skipped, skipped + count) if factor.axis in shared else skipped)
    return out.view(shape)[tuple(inner)]


def _block(side: Side, ranges: Ranges, source: Source) -> tuple[Tensor, list[str]]:
    """The elements of the other side with their axes; reads one rectangle that is aligned to its outer axes."""
    start, size, shape = [], [], []
    inner: list[slice | int] = []
    names = []
    for dim in side.dims:
        run = _shortest_run(dim, ranges)
        start.append(run.start)
        size.append(run.length)
        shape += run.sizes
        for factor, cut in zip(dim, run.cuts, strict=True):
            single = factor.axis not in ranges
            inner.append(cut.start if single else cut)
            names += [] if single else [factor.axis]
    block = source.read(side.tensor, (tuple(start), tuple(size)))
    return block.reshape(shape)[tuple(inner)], names


class _DimRun(NamedTuple):
    """Elements of a dim: their size on each axis, and what to take of it."""

    start: int
    length: int
    sizes: list[int]
    cuts: list[slice]


def _shortest_run(dim: tuple[Factor, ...], ranges: Ranges) -> _DimRun:
    """The shortest run that holds the ranges."""
    low, count = 0, math.prod(factor.extent for factor in dim)
    sizes, cuts, narrow = [], [], True
    for factor in dim:
        first, length = ranges.get(factor.axis, (0, 1))
        first += factor.first
        if narrow:
            count //= factor.extent
            low, count = low + first * count, count * length
            sizes.append(length)
            cuts.append(slice(0, length))
            # The next axis can be cut only where this one has a single element.
            narrow = length == 1
            continue
        sizes.append(factor.extent)
        cuts.append(slice(first, first + length))
    return _DimRun(low, count, sizes, cuts)
