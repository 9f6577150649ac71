"""The scan of Mamba-2 (Dao and Gu 2024), the convolution before it and the norm behind it, in plain torch.

A head has a state of P x N numbers. With A < 0, and a step D_t > 0 of each token,

    S_t = exp(D_t A) S_(t-1) + D_t x_t B_t^T        y_t = S_t C_t

so a token is forgotten by the exponential of a sum. `chunk_scan` computes chunks of tokens: within one, y is a product
with a matrix of decays, as in attention; only states pass from chunk to chunk. The size of a chunk changes the order of
sums alone. `scan_step` is the recurrence for one token. A state, and a convolution's window, restart where a document
begins. Decays, states and sums are in at least fp32.

Shapes: B rows, S tokens, C channels, K width of the convolution, H heads, P width of a head, F = H * P, G groups, each
of R heads that share B and C, N width of the state; c chunks of Q tokens.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class ScanSizes(NamedTuple):
    """Of mixers, what decides the memory that a kernel needs: P and N."""

    head_dim: int
    state_size: int


def causal_conv(
    x_BSC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor,
    *,
    document_BS: Tensor | None = None,
    before_BKC: Tensor | None = None,
) -> Tensor:
    """SiLU of each channel's convolution with its last K tokens: [B, S, C], in the dtype of x.

    Args:
        document_BS: the document of each token; None: each row is one.
        before_BKC: the K - 1 tokens before each row; None: there are none.
    """
    length, width, dtype = x_BSC.shape[1], weight_CK.shape[1], x_BSC.dtype
    wide_BSC = x_BSC.to(weight_CK.dtype)
    if before_BKC is None:
        padded_BTC = F.pad(wide_BSC, (0, 0, width - 1, 0))
    else:
        padded_BTC = torch.cat((before_BKC.to(wide_BSC.dtype), wide_BSC), 1)
    y_BSC = bias_C + wide_BSC * weight_CK[:, -1]
    for back in range(1, width):
        term_BSC = padded_BTC[:, width - 1 - back : width - 1 - back + length] * weight_CK[:, width - 1 - back]
        if document_BS is not None:
            same_BS = F.pad(document_BS, (back, 0), value=-1)[:, :length] == document_BS
            term_BSC = term_BSC * same_BS[..., None]
        y_BSC = y_BSC + term_BSC
    return F.silu(y_BSC).to(dtype)


def step_sizes(dt_BSH: Tensor, bias_H: Tensor, limit: tuple[float, float]) -> Tensor:
    """D_t: softplus of a projection of each token, within a limit: [..., H], in the dtype of the bias."""
    delta_BSH, (low, high) = F.softplus(dt_BSH.to(bias_H.dtype) + bias_H), limit
    return delta_BSH.clamp(low, high) if (low, high) != (0.0, math.inf) else delta_BSH


def gated_norm(
    y_BSHP: Tensor, x_BSHP: Tensor, z_BSF: Tensor, D_H: Tensor, weight_F: Tensor, *, groups: int, epsilon: float
) -> Tensor:
    """The RMSNorm of (y + D x) silu(z), of each group of heads alone: [..., F], in the dtype of z."""
    wide = weight_F.dtype
    y_BSHP = y_BSHP.to(wide) + D_H[:, None] * x_BSHP.to(wide)
    grouped = (y_BSHP.flatten(-2) * F.silu(z_BSF.to(wide))).unflatten(-1, (groups, -1))
    unit = grouped * (grouped.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (unit.flatten(-2) * weight_F).to(z_BSF.dtype)


def chunk_scan(
    x_BSHP: Tensor,
    delta_BSH: Tensor,
    A_H: Tensor,
    B_BSGN: Tensor,
    C_BSGN: Tensor,
    *,
    chunk: int,
    document_BS: Tensor | None = None,
    state_BHPN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y [B, S, H, P], the state after the last token [B, H, P, N]), both in the dtype of delta.

    Args:
        delta_BSH: D_t, in at least fp32. chunk: Q.
        document_BS: the document of each token, which never decreases in a row; None: each row is one.
        state_BHPN: that before the first token, of rows of one document; None: 0.
    """
    (rows, length, heads, width), (groups, size) = x_BSHP.shape, B_BSGN.shape[2:]
    of_chunk = min(chunk, length)
    missing, of_group = -length % of_chunk, heads // groups

    def chunked(x: Tensor, *shape: int) -> Tensor:
        padded = F.pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) if missing else x
        return padded.to(delta_BSH.dtype).view(rows, -1, of_chunk, *shape)

    # A token of the padding has D_t = 0: it leaves the state as it is.
    x, delta = chunked(x_BSHP, groups, of_group, width), chunked(delta_BSH, groups, of_group)
    B, C = chunked(B_BSGN, groups, size), chunked(C_BSGN, groups, size)
    log = (delta * A_H.view(groups, of_group)).cumsum(2)  # [B, c, Q, G, R]
    total = log[:, :, -1]
    hidden = torch.ones(of_chunk, of_chunk, dtype=torch.bool, device=x.device).triu(1)
    # What of a token remains at its chunk's end, what it reads of the state before, and what of that remains.
    remains, reads, keeps = (total[:, :, None] - log).exp(), log.exp(), total.exp()
    if document_BS is not None:
        document = torch.cat((document_BS, document_BS[:, -1:].expand(-1, missing)), 1).view(rows, -1, of_chunk)
        last = document[:, :, -1]
        before = F.pad(last, (1, 0), value=-1)[:, :-1]
        hidden = hidden | (document[..., :, None] != document[..., None, :])[:, :, None, None]
        remains = remains * (document == last[..., None])[..., None, None]
        reads = reads * (document == before[..., None])[..., None, None]
        keeps = keeps * (before == last)[..., None, None]
    # Within chunks.
    moved = log.permute(0, 1, 3, 4, 2)
    decay = (moved[..., :, None] - moved[..., None, :]).masked_fill(hidden, -torch.inf).exp()  # [B, c, G, R, Q, Q]
    weight = torch.einsum("bcqgn,bckgn->bcgqk", C, B)[:, :, :, None] * decay
    inputs = x * delta[..., None]
    y = torch.einsum("bcgrqk,bckgrp->bcqgrp", weight, inputs)
    # What each chunk adds to the state.
    added = torch.einsum("bcqgrp,bcqgn->bcgrpn", inputs * remains[..., None], B)
    state = x.new_zeros(rows, groups, of_group, width, size)
    if state_BHPN is not None:
        state = state_BHPN.to(x.dtype).view(state.shape)
    states = []
    for number in range(added.shape[1]):
        states.append(state)
        state = state * keeps[:, number, :, :, None, None] + added[:, number]
    y = y + torch.einsum("bcqgn,bcgrpn->bcqgrp", C, torch.stack(states, 1)) * reads[..., None]
    return y.reshape(rows, -1, heads, width)[:, :length], state.reshape(rows, heads, width, size)


def end_state(
    x_BSHP: Tensor, delta_BSH: Tensor, A_H: Tensor, B_BSGN: Tensor, *, document_BS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What tokens add to the state after the last one [B, H, P, N], and the log of what remains of one before [B, H].

    Both in the dtype of delta; the product is one of the dtype of x. See `chunk_scan`.
    """
    groups = B_BSGN.shape[2]
    log_BSH = delta_BSH * A_H
    after_BSH = log_BSH.flip(1).cumsum(1).flip(1) - log_BSH
    weight_BSH = after_BSH.exp() * delta_BSH
    if document_BS is not None:
        weight_BSH = weight_BSH * (document_BS == document_BS[:, -1:])[..., None]
    inputs = (x_BSHP * weight_BSH[..., None]).to(x_BSHP.dtype).unflatten(2, (groups, -1))
    state_BHPN = torch.einsum("bsgrp,bsgn->bgrpn", inputs, B_BSGN.to(x_BSHP.dtype)).flatten(1, 2)
    return state_BHPN.to(delta_BSH.dtype), log_BSH.sum(1)


def read_state(
    state_BHPN: Tensor, delta_BSH: Tensor, A_H: Tensor, C_BSGN: Tensor, *, same_BS: Tensor | None = None
) -> Tensor:
    """What a state before the first token adds to the results of tokens: [B, S, H, P], in the dtype of delta.

    Args:
        same_BS: which tokens belong to the document of the state; None: all.
    """
    groups, dtype = C_BSGN.shape[2], C_BSGN.dtype
    remains_BSH = (delta_BSH * A_H).cumsum(1).exp()
    if same_BS is not None:
        remains_BSH = remains_BSH * same_BS[..., None]
    state = state_BHPN.to(dtype).unflatten(1, (groups, -1))
    read_BSHP = torch.einsum("bsgn,bgrpn->bsgrp", C_BSGN, state).flatten(2, 3)
    return read_BSHP.to(delta_BSH.dtype) * remains_BSH[..., None]


def scan_step(
    x_BHP: Tensor, delta_BH: Tensor, A_H: Tensor, B_BGN: Tensor, C_BGN: Tensor, *, state_BHPN: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each row: (y [B, H, P], the state after it), in the dtype of the state."""
    of_group, dtype = x_BHP.shape[1] // B_BGN.shape[1], state_BHPN.dtype
    B_BHN, C_BHN = (part.to(dtype).repeat_interleave(of_group, 1) for part in (B_BGN, C_BGN))
    delta_BH = delta_BH.to(dtype)
    added_BHPN = (x_BHP.to(dtype) * delta_BH[..., None])[..., None] * B_BHN[:, :, None]
    state_BHPN = state_BHPN * (delta_BH * A_H.to(dtype)).exp()[..., None, None] + added_BHPN
    return (state_BHPN * C_BHN[:, :, None]).sum(-1), state_BHPN
