"""Attention of a decoder to what the encoder made of its rows, and biases of relative positions.

The encoder's output is read by every block of the decoder, so it is gathered once for all of them (`share`), and the
gradients of all blocks are added up before one collective sums them over tp.

Shapes: B rows, S tokens of the decoder, T of the encoder, N = B * S, M = B * T, D hidden, H local heads, K head width,
R buckets of distances.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.kernels.plain import ScoreTensors
from trainer.kernels.table import Kernels
from trainer.layers.attention import PackedTokens, pack, spread
from trainer.layers.base import Layer, Parallel, as_input
from trainer.layers.dropout import Dropout
from trainer.layers.linear import Linear
from trainer.layers.shapes import AttentionShape
from trainer.parallel.collectives import Group
from trainer.parallel.conjugates import copy_to_group, gather_sequence


@dataclass(frozen=True, slots=True)
class CrossRows:
    """How decoder and encoder tokens form rows: B rows of S and of T tokens.

    Args:
        lengths_B: int32[B], real tokens of the encoder's rows; None: all are.
        packed, read: which tokens of the decoder's and of the encoder's rows there are; None: all.
        samples_B: int64[B], global sample numbers; None: nothing is dropped.
    """

    batch: int
    length: int
    encoder_length: int
    lengths_B: Tensor | None = None
    samples_B: Tensor | None = None
    packed: PackedTokens | None = None
    read: PackedTokens | None = None


def share(context_MD: Tensor, parallel: Parallel) -> Tensor:
    """The encoder's output for all blocks of a stage, whole on each rank; their gradients are partial sums."""
    enter = gather_sequence if parallel.sequence_parallel else copy_to_group
    return enter(context_MD, parallel.tp)


class CrossAttention(Layer):
    """Queries of the decoder's tokens, keys and values of the encoder's.

    Args:
        dropout: of the weights of attention; None: nothing is dropped.
    """

    def __init__(
        self, shape: AttentionShape, parallel: Parallel, *, kernels: Kernels, dropout: Dropout | None = None
    ) -> None:
        super().__init__()
        self.shape, self.kernels, self.dropout = shape, kernels, dropout
        self.heads = shape.num_heads // parallel.tp.size
        self.first_head, inner = parallel.tp.rank * self.heads, self.heads * shape.head_dim
        self.q = Linear(shape.width, inner, parallel=parallel, bias=shape.bias, column=True)
        # What it reads is whole already: no collective of its own.
        alone = Parallel(Group.single("tp"), sequence_parallel=False)
        self.kv = Linear(shape.width, 2 * inner, parallel=alone, bias=shape.bias, column=True)
        self.out = Linear(inner, shape.width, parallel=parallel, bias=shape.out_bias, column=False)

    def forward(self, x_ND: Tensor, context_MD: Tensor, rows: CrossRows) -> Tensor:
        k_BTHK, v_BTHK = self.keys(context_MD, rows)
        q_BSHK = spread(self.q(x_ND), rows.packed).view(rows.batch, rows.length, self.heads, -1)
        keep_BHST = None
        if self.dropout is not None and rows.samples_B is not None and torch.is_grad_enabled():
            columns_S = torch.arange(rows.length, device=x_ND.device)
            mine = range(self.first_head, self.first_head + self.heads)
            keep_BHST = self.dropout.keep_weights(rows.samples_B, mine, length=rows.encoder_length, columns_S=columns_S)
        tensors = ScoreTensors(keep_BHST=keep_BHST, length_B=rows.lengths_B)
        y_BSHK = self.kernels.scored_attention(q_BSHK, k_BTHK, v_BTHK, self.shape.scores, tensors)
        return self.out(pack(y_BSHK.flatten(0, 1).flatten(1), rows.packed))

    def step(self, x_ND: Tensor, *, kept: Mapping[str, Tensor], slot_N: Tensor, length_N: Tensor) -> Tensor:
        """New tokens of several rows, whose keys and values are kept under their slots."""
        q_N1HK = self.q(x_ND).view(len(x_ND), 1, self.heads, -1)
        k_NTHK, v_NTHK = (kept[name][slot_N] for name in ("key", "value"))
        tensors = ScoreTensors(length_B=length_N)
        y_N1HK = self.kernels.scored_attention(q_N1HK, k_NTHK, v_NTHK, self.shape.scores, tensors)
        return self.out(y_N1HK.flatten(1))

    def keys(self, context_MD: Tensor, rows: CrossRows) -> tuple[Tensor, Tensor]:
        """Keys and values of the encoder's tokens: [B, T, H, K] each."""
        both = spread(self.kv(context_MD), rows.read).view(rows.batch, rows.encoder_length, 2, self.heads, -1)
        k_BTHK, v_BTHK = both.unbind(2)
        return k_BTHK, v_BTHK


class RelativeBias(Layer):
    """A learned bias of each bucket of distances and each head, for all blocks of a stack (Raffel et al. 2020)."""

    def __init__(self, buckets: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(buckets, heads))

    def forward(self) -> Tensor:
        """The table in at least fp32: [R, H]."""
        return as_input(self, "weight")


def bucket_of(distance: Tensor, *, both: bool, buckets: int, longest: int) -> Tensor:
    """The bucket of each distance, position of the key - position of the query: int64.

    Half of the buckets are for one distance each, the others for ranges that grow up to `longest`.

    Args:
        both: half of the buckets are for later keys; otherwise these share the bucket of distance 0.
    """
    first = torch.zeros_like(distance)
    if both:
        buckets //= 2
        first, distance = (distance > 0).long() * buckets, distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    # In fp32, as the models that were trained with it computed the borders between buckets.
    ratio = (distance.float() / exact).clamp(min=1).log() / math.log(longest / exact)
    ranges = exact + (ratio * (buckets - exact)).long()
    return first + torch.where(distance < exact, distance, ranges.clamp(max=buckets - 1))


def relative_bias(table_RH: Tensor, length: int, *, both: bool, longest: int) -> Tensor:
    """The biases of rows of this length: [H, S, S]; see `bucket_of`."""
    # A row of each distance, of which the scores of a query are a part. Gradients are added in a fixed order on both
    # kinds of device, and there are few rows of one bucket, which a GPU adds one after the other.
    distance = torch.arange(1 - length, length, device=table_RH.device)
    of_distance = bucket_of(distance, both=both, buckets=len(table_RH), longest=longest)
    return table_RH[of_distance].t().unfold(1, length, 1).flip(1)


def far_biases(table_RH: Tensor, *, longest: int) -> Tensor:
    """The decoder's biases of keys 0, 1, ... tokens before a query, to the distance from which on all are equal."""
    distance = -torch.arange(longest + 1, device=table_RH.device)
    return table_RH[bucket_of(distance, both=False, buckets=len(table_RH), longest=longest)].t()
