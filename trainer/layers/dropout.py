"""Dropout (Srivastava et al. 2014) with masks that are functions of the run's seed and of the positions they apply to.

A mask is never stored: backward, and recomputation of a block, compute it again from the global sample number, layer,
site, position and feature. So it is the same in every layout, and a run that continues from a checkpoint draws the same
masks as an uninterrupted one. Nothing is dropped if no gradients are computed. Construction version 2: key =
derive_key("mtrain dropout v2", seed, layer, site), low 64 bits; see kernels/philox.py.

Shapes: B batch, S sequence, N tokens of this rank, D hidden, H heads of this rank.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mdata.util.random_keys import derive_key
from trainer.kernels.philox import keep
from trainer.kernels.table import Kernels

Site = Literal["embedding", "attention", "mlp", "mixer", "weights", "cross", "cross_weights", "pooled"]


class TokenPlaces(NamedTuple):
    """The tokens of this rank: their global sample numbers and positions in the samples, int64[N] each."""

    sample_N: Tensor
    position_N: Tensor


def token_places(
    samples_B: Tensor, length: int, *, mine: slice, columns_S: Tensor | None = None, flat_M: Tensor | None = None
) -> TokenPlaces:
    """The places of flat tokens [mine] of rows of one length.

    Args:
        columns_S: int64[length], their positions in the row under context parallelism; None: from 0 on.
        flat_M: int64[M], the flat tokens that there are, of which `mine` are this rank's; None: all.
    """
    token_N = torch.arange(mine.start, mine.stop, device=samples_B.device) if flat_M is None else flat_M[mine]
    position_N = token_N % length
    return TokenPlaces(samples_B[token_N // length], position_N if columns_S is None else columns_S[position_N])


class Dropout:
    """One site of one layer.

    Args:
        probability: of an element to become 0; the others are multiplied by 1 / (1 - probability).
        seed: of the run. layer: its number in the whole model. site: which of the layer's sites.
    """

    def __init__(self, probability: float, *, seed: int, layer: int, site: Site, kernels: Kernels) -> None:
        low = derive_key("mtrain dropout v2", seed, layer, site).low
        self.probability, self.kernels = probability, kernels
        self._words, self._key_2 = (low & 0xFFFFFFFF, low >> 32), torch.empty(0, dtype=torch.int64)

    def __call__(self, x_ND: Tensor, places: TokenPlaces | None) -> Tensor:
        """x with some elements dropped; x itself if no gradients are computed."""
        if places is None or not self.probability or not torch.is_grad_enabled():
            return x_ND
        return _Dropout.apply(x_ND, places, self._key(x_ND.device), self)

    def keep_weights(self, samples_B: Tensor, heads: range, *, length: int, columns_S: Tensor | None = None) -> Tensor:
        """The weights of attention that are kept: bool[B, H, S, T], of global heads.

        Args:
            length: T, tokens of a row. columns_S: int64[S], the positions of the queries in it; None: all.
        """
        batch, device = len(samples_B), samples_B.device
        head = torch.arange(heads.start, heads.stop, device=device)
        query_S = torch.arange(length, device=device) if columns_S is None else columns_S
        shape = (batch, len(heads), len(query_S))
        rows = torch.broadcast_tensors(samples_B.view(-1, 1, 1), query_S.view(1, 1, -1), head.view(1, -1, 1))
        sample, position, head = (x.expand(shape).flatten() for x in rows)
        kept = keep(sample, position, head, features=length, key_2=self._key(device), probability=self.probability)
        return kept.view(*shape, length)

    def _key(self, device: torch.device) -> Tensor:
        if self._key_2.device != device or not len(self._key_2):
            self._key_2 = torch.tensor(self._words, dtype=torch.int64, device=device)
        return self._key_2


class _Dropout(torch.autograd.Function):
    """Forward and backward are the same function; only the positions are saved."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, places: TokenPlaces, key_2: Tensor, site: Dropout) -> Tensor:
        ctx.places, ctx.key_2, ctx.site = places, key_2, site
        return site.kernels.dropout(x_ND, *places, key_2, site.probability)

    @staticmethod
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.site.kernels.dropout(dy_ND, *ctx.places, ctx.key_2, ctx.site.probability), None, None, None
