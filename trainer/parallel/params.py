"""Which parts of which logical tensors make up a rank's parameters, and the rules for each.

A *logical* tensor is a tensor of the model's definition (`blocks.0.attention.q.weight`), whole and without padding. A
*local* parameter is what one rank holds: rectangles of logical tensors, one after the other in memory, possibly
followed by padding. One tuple of `ParamSpec` describes a rank completely: allocation, initialization, the optimizer's
buffers, reductions, the norm, checkpoints and `ranks.json` all use it. Pure: numbers in, frozen data out, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

ShardAxis = Literal["data", "edp"]
SHARD_AXES: tuple[str, ...] = get_args(ShardAxis)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The coordinates of a rank that decide which parameters it holds.

    Args:
        tp_rank, tp_size: of the tensor-parallel ranks.
        stage, num_stages: of the pipeline, whose ranks may have several stages each.
        layers_per_stage: blocks of each stage; empty: as equal as possible.
        ends_apart: whether the first and the last stage are on different ranks.
        ep_rank, ep_size: of the ranks that have different experts. etp_size: ranks that share each; 0: those of tp.
        sequence_parallel: whether parameters that all tp ranks hold see only part of the tokens on each.
    """

    tp_rank: int = 0
    tp_size: int = 1
    stage: int = 0
    num_stages: int = 1
    layers_per_stage: tuple[int, ...] = ()
    ends_apart: bool = True
    sequence_parallel: bool = False
    ep_rank: int = 0
    ep_size: int = 1
    etp_size: int = 0

    @property
    def expert_tp(self) -> tuple[int, int]:
        """(rank, size) among the ranks that share each expert."""
        size = self.etp_size or self.tp_size
        return self.tp_rank % size, size

    @property
    def is_first(self) -> bool:
        """Whether tokens enter here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage == self.num_stages - 1

    def blocks(self, num_layers: int) -> range:
        """The blocks of this stage."""
        layers = self.layers_per_stage or equal_layers(num_layers, self.num_stages)
        start = sum(layers[: self.stage])
        return range(start, start + layers[self.stage])


def equal_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Blocks of each stage: as equal as possible, the longer stages in the middle.

    The last stage, which holds the head as well, is never a longer one.
    """
    each, more = divmod(num_layers, num_stages)
    first_longer = (num_stages - more) // 2
    return tuple(each + (first_longer <= stage < first_longer + more) for stage in range(num_stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A rectangle of a logical tensor, stored row-major and contiguous in a local parameter.

    Args:
        name: the logical tensor.
        shape: its whole shape, without padding.
        start: first index of the rectangle in each dim.
        size: extent of the rectangle in each dim.
        offset: index of the local parameter's element at which it begins.
        std_factor: by which the standard deviation of its initial values differs from that of the parameter.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    offset: int = 0
    std_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Initial values that are not normal numbers: of a uniform u in [low, high).

    Args:
        value: u; "log": ln u; "softplus_inverse": x of softplus(x) = max(exp(u), least).
    """

    low: float
    high: float
    value: Literal["uniform", "log", "softplus_inverse"] = "uniform"
    least: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """One local parameter of one rank.

    Args:
        name: its path in the module tree.
        shape: its local shape, with padding.
        pieces: of which it consists.
        std: standard deviation of its initial values; 0 with fill or spread.
        fill: its initial constant if std is 0. spread: its initial values instead; None: normal or constant ones.
        decay: whether weight decay applies.
        matrix: whether its pieces are matrices of a block, or have one for each index of their leading dims, whose
            updates Muon orthogonalizes.
        vocabulary: whether its rows belong to tokens: the token embedding, or the output head.
        block: when it is used in the forward pass: 0 before the first block, n in the n-th block, and so on. Buffers
            are divided between blocks. again: a second block that uses it, or None.
        copies: the axes along which ranks hold copies of it ("tp"; "ends" where the first and the last pipeline stage
            share it). Along all other axes ranks hold different parts, or other parameters.
        partial: those of `copies` along which each rank's gradient is a partial sum; along the rest the gradients are
            equal.
        shard: the axis over which gradients are summed in any case, and which divides the optimizer's state: "data", or
            "edp" for the weights of experts.
        frozen: whether it keeps its first values: it has no gradient, main weights or moments, and is in no checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    std: float
    fill: float = 0.0
    spread: Spread | None = None
    decay: bool
    matrix: bool = False
    vocabulary: bool = False
    block: int
    again: int | None = None
    copies: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    shard: ShardAxis = "data"
    frozen: bool = False

    @property
    def numel(self) -> int:
        """Elements held locally, with padding."""
        return math.prod(self.shape)

    @property
    def blocks(self) -> frozenset[int]:
        """The blocks in which it is used."""
        return frozenset({self.block} if self.again is None else {self.block, self.again})


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A rectangle of a logical tensor and its position in a flat local parameter.

    Args:
        name: the logical tensor.
        shape: its whole shape.
        start: first index of the rectangle in each dim.
        size: its extent in each dim.
        flat: index of the local parameter's element at which it begins; contiguous from there, row-major.
        std_factor: see `Piece`.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    flat: int
    std_factor: float = 1.0


def with_adapters(
    specs: Iterable[ParamSpec], *, rank: int, targets: Sequence[str], saved: Sequence[str] = (), tp_size: int
) -> Iterator[ParamSpec]:
    """A table whose parameters are frozen, with adapters of low rank beside its matrices (Hu et al. 2022, "LoRA").

    The logical matrix W [O, I] of `blocks.0.attention.q.weight` gets A [rank, I] and B [O, rank], `...q.lora_a` and
    `...q.lora_b`. Those of matrices that share a local parameter share one too, one below the other. Where W is divided
    over tp by rows, so is B, and A is whole; where it is divided by columns, so is A, and B is whole. Each rank has a
    partial sum of the gradient of the whole one.

    Args:
        targets: the last parts of the names of layers whose matrices get adapters.
        saved: names of layers that are trained as they are.
        tp_size: tensor-parallel ranks.
    """
    whole: dict[str, Any] = {"copies": ("tp",), "partial": ("tp",) if tp_size > 1 else ()}
    for spec in specs:
        if spec.name.removesuffix(".weight") in saved:
            yield spec
            continue
        yield replace(spec, frozen=True, partial=())
        pieces = [piece for piece in spec.pieces if piece.name.split(".")[-2] in targets] if spec.matrix else []
        if not pieces:
            continue
        inputs = pieces[0].shape[1]
        divided: dict[str, Any] = {"copies": spec.copies, "partial": spec.partial}
        of_a, of_b = (divided, whole) if pieces[0].size[1] < inputs else (whole, divided)
        a, b, rows = [], [], 0
        for number, piece in enumerate(pieces):
            layer, (outputs, _), width = piece.name.removesuffix(".weight"), piece.shape, piece.size[1]
            a.append(
                Piece(
                    name=f"{layer}.lora_a",
                    shape=(rank, inputs),
                    start=(0, piece.start[1]),
                    size=(rank, width),
                    offset=number * rank * width,
                )
            )
            b.append(
                Piece(
                    name=f"{layer}.lora_b",
                    shape=(outputs, rank),
                    start=(piece.start[0], 0),
                    size=(piece.size[0], rank),
                    offset=rows * rank,
                )
            )
            rows += piece.size[0]
        layer, shapes = spec.name.removesuffix(".weight"), ((len(pieces) * rank, width), (rows, rank))
        # The variance of torch's own first values of a linear layer, as PEFT has it; B is 0, so that nothing changes.
        stds = (3 * inputs) ** -0.5, 0.0
        for name, shape, of, std, rules in zip("ab", shapes, (a, b), stds, (of_a, of_b), strict=True):
            yield ParamSpec(
                name=f"{layer}.lora_{name}",
                shape=shape,
                pieces=tuple(of),
                std=std,
                decay=True,
                block=spec.block,
                shard=spec.shard,
                **rules,
            )


def num_elements(specs: Iterable[ParamSpec]) -> int:
    """Elements of all logical tensors in these specs, without padding and copies."""
    return sum({piece.name: math.prod(piece.shape) for spec in specs for piece in spec.pieces}.values())


def is_first_copy(copies: tuple[str, ...], index: Callable[[str], int]) -> bool:
    """Whether this rank is the first of those that hold a parameter: only its copy counts in norms and is saved.

    Args:
        copies: of the parameter.
        index: axis -> this rank's position on it.
    """
    return all(index(axis) == 0 for axis in copies)


def slices(spec: ParamSpec, *, first: int, stop: int) -> Iterator[Slice]:
    """The logical rectangles that cover elements [first, stop) of a flat local parameter; padding is skipped."""
    for piece in spec.pieces:
        low = max(first, piece.offset) - piece.offset
        high = min(stop, piece.offset + math.prod(piece.size)) - piece.offset
        for start, size, flat in rectangles(piece.size, low, high=high):
            yield Slice(
                name=piece.name,
                shape=piece.shape,
                start=tuple(a + b for a, b in zip(piece.start, start, strict=True)),
                size=size,
                flat=piece.offset + flat,
                std_factor=piece.std_factor,
            )


def rectangles(
    shape: tuple[int, ...], low: int, *, high: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Cut elements [low, high) of a row-major tensor into at most 2 x dims - 1 rectangles: (start, size, low)."""
    inner = math.prod(shape[1:])
    while low < high:
        row, column = divmod(low, inner)
        rows = (high - low) // inner if column == 0 else 0
        if rows:
            yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:]), low
            low += rows * inner
            continue
        count = min(inner - column, high - low)
        for start, size, flat in rectangles(shape[1:], column, high=column + count):
            yield (row, *start), (1, *size), row * inner + flat
        low += count


def vocabulary_range(vocab_size: int, padded_rows: int, *, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """The ids [first, stop) whose rows a rank holds; without padding, so it may be empty.

    Args:
        padded_rows: rows over all ranks, a multiple of tp_size.
    """
    rows = padded_rows // tp_size
    return min(tp_rank * rows, vocab_size), min((tp_rank + 1) * rows, vocab_size)
