"""A family that needs all that GPT does not: a 3-D tensor, a buffer that steps change, and a loss of another weight.

A GPT whose MLP is a mixture of all experts: their weights are softmax(bias), with a bias that no optimizer updates. It
rises for experts whose number was rare among the step's tokens (token id modulo experts). The loss "spread", of every
block, is the mean over experts of the mean square of their outputs; its denominator has nothing to do with tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config import parse
from trainer.config.sections import ModelSection
from trainer.layers.base import Layer, Parallel, as_input
from trainer.models import family as families
from trainer.models.gpt import FAMILY as GPT_FAMILY
from trainer.models.gpt.model import GPT, Block, Context, build_gpt
from trainer.models.gpt.shape import GPTShape
from trainer.models.stage import Microbatch, NamedLoss, Tensors
from trainer.parallel.collectives import Group, all_reduce_
from trainer.parallel.conjugates import gather_sequence, reduce_from_group, scatter_sequence
from trainer.parallel.params import ParamSpec, Piece, Place

EXPERTS, FACTOR, RATE = 3, 0.7, 0.25


def parameters(shape: GPTShape, place: Place) -> tuple[ParamSpec, ...]:
    """A GPT's, with experts in place of the MLP: [E, gate and up, D] and [E, D, F], divided along F."""
    table = []
    for spec in GPT_FAMILY.parameters(shape, place):
        block, _, part = spec.name.partition(".mlp.")
        if part:
            table.append(_up(spec, f"{block}.mlp", shape, place) if part == "up.weight" else _down(spec, block, shape))
        else:
            table.append(spec)
    return tuple(table)


def _up(spec: ParamSpec, name: str, shape: GPTShape, place: Place) -> ParamSpec:
    width, part = shape.hidden_size, shape.ffn_hidden_size // place.tp_size
    names, pieces = (f"{name}.gate", f"{name}.up"), []
    for expert in range(EXPERTS):
        for half, logical in enumerate(names):
            pieces.append(
                Piece(
                    name=logical,
                    shape=(EXPERTS, shape.ffn_hidden_size, width),
                    start=(expert, place.tp_rank * part, 0),
                    size=(1, part, width),
                    offset=(2 * expert + half) * part * width,
                )
            )
    return dataclasses.replace(spec, name=f"{name}.up", shape=(EXPERTS, 2 * part, width), pieces=tuple(pieces))


def _down(spec: ParamSpec, block: str, shape: GPTShape) -> ParamSpec:
    (piece,), (rows, part), name = spec.pieces, spec.shape, f"{block}.mlp.down"
    whole = dataclasses.replace(
        piece, name=name, shape=(EXPERTS, *piece.shape), start=(0, *piece.start), size=(EXPERTS, *piece.size)
    )
    return dataclasses.replace(spec, name=name, shape=(EXPERTS, rows, part), pieces=(whole,))


def buffers(shape: GPTShape, place: Place) -> tuple[ParamSpec, ...]:
    """One bias of experts in each block."""
    return tuple(
        ParamSpec(
            name=f"blocks.{i}.mlp.bias",
            shape=(EXPERTS,),
            pieces=(Piece(name=f"blocks.{i}.mlp.bias", shape=(EXPERTS,), start=(0,), size=(EXPERTS,)),),
            std=0.0,
            fill=0.125 * i,
            decay=False,
            block=i + 1,
            copies=("tp",),
        )
        for i in place.blocks(shape.num_layers)
    )


class Experts(Layer):
    """The mixture of all experts, and their mean squares."""

    def __init__(self, shape: GPTShape, parallel: Parallel) -> None:
        super().__init__()
        part = shape.ffn_hidden_size // parallel.tp.size
        self.parallel = parallel
        self.up = nn.Parameter(torch.empty(EXPERTS, 2 * part, shape.hidden_size))
        self.down = nn.Parameter(torch.empty(EXPERTS, shape.hidden_size, part))
        self.register_buffer("bias", torch.empty(EXPERTS))

    def forward(self, y_ND: Tensor) -> tuple[Tensor, Tensor]:
        """[N of this rank, D], and the sum over experts of the mean square of their outputs."""
        tp, scatters = self.parallel.tp, self.parallel.sequence_parallel
        up, down = (as_input(self, name).to(y_ND.dtype) for name in ("up", "down"))
        all_ND = gather_sequence(y_ND, tp) if scatters else _copied(y_ND, tp)
        gate, value = torch.einsum("nd,efd->enf", all_ND, up).chunk(2, dim=2)
        partial_END = torch.einsum("enf,edf->end", nn.functional.silu(gate) * value, down)
        tokens, experts = all_ND.shape[0], EXPERTS
        if scatters:
            partial = partial_END.transpose(0, 1).reshape(tokens, -1)
            out_NED = scatter_sequence(partial, tp).view(-1, experts, y_ND.shape[1])
        else:
            out_NED = reduce_from_group(partial_END, tp).transpose(0, 1)
        squares = out_NED.square().sum() / (tokens * y_ND.shape[1])
        shares = self.bias.to(y_ND.dtype).softmax(0)
        return torch.einsum("ned,e->nd", out_NED, shares), squares


class ToyBlock(Block):
    """A GPT's block with experts."""

    def __init__(self, shape: GPTShape, parallel: Parallel, **how: Any) -> None:
        super().__init__(shape, parallel, **how)
        self.mlp = Experts(shape, parallel)
        self.squares: Tensor | None = None

    def forward(self, x_ND: Tensor, branch_ND: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        x_ND, y_ND = self.attention_norm(x_ND, branch_ND)
        x_ND, y_ND = self.mlp_norm(x_ND, self.attention(y_ND, context.sequences))
        branch_ND, self.squares = self.mlp(y_ND)
        return x_ND, branch_ND


class Toy(GPT):
    """A stage of the toy family."""

    block_type = ToyBlock

    def forward(self, received: Tensors, batch: Microbatch) -> Tensors:
        outputs = super().forward(received, batch)
        tp, cp = self.parallel.tp, self.cp
        for name in self.blocks:
            squares = self.blocks[name].squares
            if batch.losses is not None:
                # Under sequence parallelism each rank has the sum of its tokens, with cp of its part of each row.
                shown = squares.detach().clone()
                shown = all_reduce_(shown, tp) if self.parallel.sequence_parallel else shown
                shown = all_reduce_(shown, cp) / cp.size
                value = squares / cp.size
                value = value + (shown - value.detach())
                loss = NamedLoss(value, torch.tensor(float(EXPERTS), device=value.device), FACTOR)
                batch.losses[f"spread_{name}"] = loss
        if batch.counts is not None and self.place.is_last:
            batch.counts["tokens"] = torch.bincount(batch.tokens_BS.flatten() % EXPERTS, minlength=EXPERTS).double()
        return outputs

    def next_buffers(self, counts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        tokens = counts["tokens"]
        change = RATE * torch.sign(tokens.mean() - tokens)
        return {f"blocks.{i}.mlp.bias": self.blocks[i].mlp.bias + change for i in self.blocks}


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_(grad.contiguous().clone(), ctx.group), None


def _copied(x: Tensor, group: Group) -> Tensor:
    """Forward: identity. Backward: all-reduce. (f of Shoeybi et al.)"""
    return x if group.size == 1 else _Copied.apply(x, group)


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """The family as "toy" in this process."""
    before, hint = families.FAMILIES, ModelSection.__annotations__["family"]
    families.FAMILIES = MappingProxyType({**before, "toy": __name__})
    ModelSection.__annotations__["family"] = 'Literal["gpt", "toy"]'
    parse._hints.cache_clear()
    try:
        yield
    finally:
        families.FAMILIES, ModelSection.__annotations__["family"] = before, hint
        parse._hints.cache_clear()


FAMILY = dataclasses.replace(
    GPT_FAMILY,
    parameters=parameters,
    buffers=buffers,
    losses=lambda shape: tuple(f"spread_{i}" for i in range(shape.num_layers)),
    counts=lambda shape: {"tokens": EXPERTS},
    build=functools.partial(build_gpt, model=Toy),
    hugging_face=None,
    megatron=None,
)
