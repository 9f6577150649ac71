"""Self-attention with H query heads over G key-value heads (Ainslie et al. 2023 for G < H).

If there are fewer key-value heads than tp ranks, neighbouring ranks hold copies of one, in a separate projection: the
gradient of the head is the sum of theirs.

Shapes: B batch, S sequence, N = B * S tokens, D hidden, H and G local heads, K head width.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.kernels.plain import ScoreTensors
from trainer.kernels.scores import alibi_slopes
from trainer.kernels.table import Kernels
from trainer.layers.base import Layer, Parallel, as_input
from trainer.layers.context_attention import context_attention
from trainer.layers.context_rows import ContextRows, gather_keys
from trainer.layers.dropout import Dropout
from trainer.layers.linear import Linear
from trainer.layers.norm import HeadsNorm, Norm
from trainer.layers.paged import PagedStep, Pages, RowStates, attend_pages
from trainer.layers.rope import Rotation, Rotations, rotate, split_heads
from trainer.layers.shapes import AttentionShape
from trainer.parallel.collectives import Group


@dataclass(frozen=True, slots=True)
class Documents:
    """Where documents begin and end in the N flat tokens; no token attends to another document.

    Args:
        bounds: int32, from 0 to N. longest: tokens of the longest document.
    """

    bounds: Tensor
    longest: int

    def numbers(self, batch: int, length: int) -> Tensor:
        """The document of each token: int64[B, S]."""
        token = torch.arange(batch * length, device=self.bounds.device, dtype=self.bounds.dtype)
        return torch.searchsorted(self.bounds, token, right=True).view(batch, length)


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """The tokens of rows that are computed, M of them; attention alone spreads them to whole rows.

    Args:
        flat_M: int64[M], their places among the tokens of whole rows, N of them.
        place_N: int64[N], the place of each token of whole rows among them; anything for those that are left out.
    """

    flat_M: Tensor
    place_N: Tensor

    @classmethod
    def of(cls, flat_M: Tensor, num_tokens: int) -> PackedTokens:
        """With the places of all tokens."""
        place_N = torch.zeros(num_tokens, dtype=torch.int64, device=flat_M.device)
        return cls(flat_M, place_N.index_copy(0, flat_M, torch.arange(len(flat_M), device=flat_M.device)))


def spread(x_MF: Tensor, packed: PackedTokens | None) -> Tensor:
    """The features of whole rows: [N, F]; those of a token that is left out are never read."""
    return x_MF if packed is None else _Spread.apply(x_MF, packed)


def pack(x_NF: Tensor, packed: PackedTokens | None) -> Tensor:
    """The tokens that are computed, of whole rows: [M, F]."""
    return x_NF if packed is None else _Pack.apply(x_NF, packed)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MF: Tensor, packed: PackedTokens) -> Tensor:
        ctx.packed = packed
        return x_MF.index_select(0, packed.place_N)

    @staticmethod
    def backward(ctx: Any, dx_NF: Tensor) -> tuple[Tensor, None]:
        return dx_NF.index_select(0, ctx.packed.flat_M), None


class _Pack(torch.autograd.Function):
    """Tokens that are left out have the gradient 0, so that they add nothing to those of keys."""

    @staticmethod
    def forward(ctx: Any, x_NF: Tensor, packed: PackedTokens) -> Tensor:
        ctx.packed = packed
        return x_NF.index_select(0, packed.flat_M)

    @staticmethod
    def backward(ctx: Any, dx_MF: Tensor) -> tuple[Tensor, None]:
        flat_M, place_N = ctx.packed.flat_M, ctx.packed.place_N
        return dx_MF.new_zeros(len(place_N), dx_MF.shape[1]).index_copy(0, flat_M, dx_MF), None


@dataclass(frozen=True, slots=True)
class Sequences:
    """How the tokens [N] of a microbatch form rows: B rows of S tokens.

    Args:
        rotation: of the tokens' positions; None for a model without rotary positions.
        documents: None if each row is one document.
        samples_B: int64[B], global sample numbers; None: nothing is dropped.
        context: if rows are divided over ranks; documents are then those of whole rows. None: rows are whole.
        packed: which of the rows' tokens there are; None: all.
        step: a step of generation: the tokens are new ones of rows in pages. pages, states: those of this block.
        lengths_B: int32[B], real tokens of each row; the rest is padding, to which nothing attends. None: all are real.
        bias_HST: what relative positions add to the scores of this rank's heads; None: nothing. far_HD: the same in a
            step of generation; mask_BHST: what kernels read in its place; see `ScoreTensors`.
    """

    batch: int
    length: int
    rotation: Rotations | None
    documents: Documents | None = None
    samples_B: Tensor | None = None
    context: ContextRows | None = None
    step: PagedStep | None = None
    pages: Pages | None = None
    states: RowStates | None = None
    lengths_B: Tensor | None = None
    bias_HST: Tensor | None = None
    far_HD: Tensor | None = None
    mask_BHST: Tensor | None = None
    packed: PackedTokens | None = None

    def of_block(self, number: int) -> Sequences:
        """As the attention of a block sees them."""
        if self.step is None:
            return self
        return replace(self, pages=self.step.pages.get(number), states=self.step.states.get(number))

    @property
    def row_length(self) -> int:
        """Tokens of a whole row."""
        return self.length if self.context is None else self.context.length


class Attention(Layer):
    """One projection for q, k and v, attention, one projection back.

    Args:
        dropout: of the weights of attention; None: nothing is dropped.
    """

    def __init__(
        self, shape: AttentionShape, parallel: Parallel, *, kernels: Kernels, dropout: Dropout | None = None
    ) -> None:
        super().__init__()
        tp, self.shape = parallel.tp.size, shape
        self.kernels, self.dropout = kernels, dropout
        heads, groups = shape.num_heads // tp, max(1, shape.num_kv_heads // tp)
        self.sizes, self.first_head = (heads, groups, groups), parallel.tp.rank * heads
        if shape.scores.sinks == "learned":
            self.sink = nn.Parameter(torch.empty(heads))
        inner = self._make_projections(parallel)
        self._slopes = functools.lru_cache(maxsize=4)(self._make_slopes)
        self.out = Linear(inner, shape.width, parallel=parallel, bias=shape.out_bias, column=False)

    def _make_projections(self, parallel: Parallel) -> int:
        """The layers that make queries, keys and values; returns the inputs of the projection back."""
        shape, (heads, groups, _), tp = self.shape, self.sizes, parallel.tp.size
        width = shape.width
        if shape.num_kv_heads < tp:
            self.q = Linear(width, heads * shape.head_dim, parallel=parallel, bias=shape.bias, column=True)
            self.kv = Linear(width, 2 * groups * shape.head_dim, parallel=parallel, bias=shape.bias, column=True)
        else:
            outputs = sum(self.sizes) * shape.head_dim
            self.qkv = Linear(width, outputs, parallel=parallel, bias=shape.bias, column=True)
        if shape.qk_norm:
            self.q_norm, self.k_norm = (
                _heads_norm(shape, number, tp=parallel.tp, kernels=self.kernels) for number in self.sizes[:2]
            )
        return heads * shape.head_dim

    def forward(self, x_ND: Tensor, sequences: Sequences) -> Tensor:
        q_BSHK, k_BSGK, v_BSGK = self._heads(x_ND, sequences)
        if sequences.pages is not None:
            q_NHK, k_NGK, v_NGK = (x.flatten(0, 1) for x in (q_BSHK, k_BSGK, v_BSGK))
            scores, tensors = self.shape.scores, self._score_tensors(q_BSHK, sequences)
            y_BSHK = attend_pages(
                q_NHK, k_NGK, v_NGK, sequences.pages, scores=scores, tensors=tensors, kernels=self.kernels
            )[None]
        elif sequences.context is not None:
            y_BSHK = self._attend_over_ranks((q_BSHK, k_BSGK, v_BSGK), sequences, sequences.context.cp)
        else:
            y_BSHK = self._attend((q_BSHK, k_BSGK, v_BSGK), sequences)
        return self.out(pack(y_BSHK.flatten(0, 1).flatten(1), sequences.packed))

    def _turn(self, sequences: Sequences) -> Rotation | None:
        """The angles by which this layer rotates heads."""
        if self.shape.rotary is None or sequences.rotation is None:
            return None
        return sequences.rotation.in_windows if self.shape.scores.window else sequences.rotation.full

    def _make_slopes(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        mine = slice(self.first_head, self.first_head + self.sizes[0])
        return torch.tensor(alibi_slopes(self.shape.num_heads)[mine], dtype=dtype, device=device)

    def _heads(self, x_ND: Tensor, sequences: Sequences) -> tuple[Tensor, ...]:
        """q, k and v, normalized and rotated."""
        shape, kernels, sizes, packed = self.shape, self.kernels, self.sizes, sequences.packed
        rows, turn = (sequences.batch, sequences.length, -1, shape.head_dim), self._turn(sequences)
        interleaved = bool(shape.rotary)
        complete_heads = shape.num_kv_heads >= self.out.parallel.tp.size
        if complete_heads and not shape.qk_norm:
            qkv = spread(self.qkv(x_ND), packed).view(rows)
            return split_heads(qkv, turn, sizes=sizes, interleaved=interleaved, kernels=kernels)
        if complete_heads:
            q, k, v = spread(self.qkv(x_ND), packed).view(rows).split(sizes, dim=2)
        else:
            q, kv = (spread(layer(x_ND), packed).view(rows) for layer in (self.q, self.kv))
            k, v = kv.split(sizes[1:], dim=2)
        if shape.qk_norm:
            q, k = _normed(q, self.q_norm), _normed(k, self.k_norm)
        q, k = (rotate(x, turn, interleaved=interleaved, kernels=kernels) for x in (q, k))
        return q, k, v

    def _attend_over_ranks(self, heads: tuple[Tensor, ...], sequences: Sequences, cp: Group) -> Tensor:
        """Attention of this rank's queries to the keys and values of all cp ranks."""
        (q_BSHK, k_BSGK, v_BSGK), scores, kernel = heads, self.shape.scores, self.kernels.chunk_kernel
        is_plain = scores.operation(documents=sequences.documents is not None) == "attention"
        if is_plain and kernel is not None and kernel.fits(q_BSHK):
            return context_attention(heads, cp, scale=scores.scale or None, kernel=kernel)
        return self._attend((q_BSHK, *gather_keys(k_BSGK, v_BSGK, cp=cp)), sequences)

    def _attend(self, heads: tuple[Tensor, ...], sequences: Sequences) -> Tensor:
        """Attention of queries to keys and values of whole rows."""
        q_BSHK, k_BSGK, v_BSGK = heads
        scores, documents, context = self.shape.scores, sequences.documents, sequences.context
        scale, ends = scores.scale or None, None if context is None else context.ends
        operation = scores.operation(documents=documents is not None)
        if operation == "attention":
            return self.kernels.attention(q_BSHK, k_BSGK, v_BSGK, scale, ends)
        if operation == "document_attention":
            return self.kernels.document_attention(q_BSHK, k_BSGK, v_BSGK, documents, scale, ends, scores.causal)
        if operation == "padded_attention":
            return self.kernels.padded_attention(q_BSHK, k_BSGK, v_BSGK, sequences.lengths_B, scale)
        return self.kernels.scored_attention(q_BSHK, k_BSGK, v_BSGK, scores, self._score_tensors(q_BSHK, sequences))

    def _score_tensors(self, q_BSHK: Tensor, sequences: Sequences) -> ScoreTensors:
        """The biases, masks and dropout of this rank's heads for the scores of these sequences."""
        scores, heads = self.shape.scores, self.sizes[0]
        dtype, device = torch.promote_types(q_BSHK.dtype, torch.float32), q_BSHK.device
        mine = slice(self.first_head, self.first_head + heads)
        sink_H = slope_H = document_BS = keep_BHST = None
        column_S = None if sequences.context is None else sequences.context.columns_S
        if scores.sinks != "none":
            sink_H = (
                as_input(self, "sink") if scores.sinks == "learned" else torch.zeros(heads, dtype=dtype, device=device)
            )
        if scores.alibi:
            slope_H = self._slopes(dtype, device)
        if sequences.documents is not None:
            document_BS = sequences.documents.numbers(sequences.batch, sequences.row_length)
        if self.dropout is not None and sequences.samples_B is not None and torch.is_grad_enabled():
            keep_BHST = self.dropout.keep_weights(
                sequences.samples_B, range(mine.start, mine.stop), length=sequences.row_length, columns_S=column_S
            )
        beside = sequences.lengths_B, sequences.bias_HST, sequences.far_HD, sequences.mask_BHST
        return ScoreTensors(sink_H, slope_H, document_BS, keep_BHST, column_S, *beside)


def _heads_norm(shape: AttentionShape, heads: int, *, tp: Group, kernels: Kernels) -> Norm | HeadsNorm:
    """The norm of queries or of keys, for this rank's number of heads."""
    assert shape.qk_norm is not None, "only called for a shape that has one"
    if shape.qk_norm_over == "head":
        return Norm(shape.head_dim, shape.qk_norm, kernels=kernels)
    if shape.qk_norm_over == "all_heads" and tp.size == 1:
        return Norm(heads * shape.head_dim, shape.qk_norm, kernels=kernels)
    return HeadsNorm(heads, shape.head_dim, shape.qk_norm, tp=tp if shape.qk_norm_over == "all_heads" else None)


def _normed(x_BSEK: Tensor, norm: Norm | HeadsNorm) -> Tensor:
    if isinstance(norm, HeadsNorm):
        return norm(x_BSEK.flatten(0, 1)).view(x_BSEK.shape)
    return norm(x_BSEK.reshape(-1, len(norm.weight)).contiguous())[1].view(x_BSEK.shape)
