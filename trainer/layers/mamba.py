"""The mixer of Mamba-2 (Dao and Gu 2024): a scan over tokens in place of attention.

    z, x, B, C, dt = in_proj(u)                 x, B, C = silu(conv1d(x, B, C))
    y = scan(x, softplus(dt + dt_bias), -exp(A_log), B, C) + D x        out_proj(norm(y silu(z)))

The norm is of each group of heads alone, so a tp rank, which has whole groups, computes all of it. State and window
restart with each document. Backward of the plain scan computes convolution, scan and norm again: only the first
projection's output is kept, and not the decays between all pairs of tokens of a chunk. Kernels of a library keep what
they need, unless the recomputation is selective.

Shapes: B rows, S tokens, N = B * S, D hidden, H local heads of P features, G local groups, F = H * P, K window.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.kernels.scan import chunk_scan, end_state, read_state, scan_step
from trainer.kernels.table import Kernels
from trainer.layers.attention import Sequences
from trainer.layers.base import Layer, Parallel, as_inputs
from trainer.layers.context_rows import ContextRows, RowChunks
from trainer.layers.linear import Linear
from trainer.layers.paged import RowStates
from trainer.layers.recompute import keep_input
from trainer.layers.shapes import MixerShape


class Convolution(Layer):
    """Weights of the convolution of each channel with its last K tokens; biases too."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels))


class GatedNorm(Layer):
    """Weights of the norm behind the gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))


class _Weights(NamedTuple):
    """All but those of the projections, in at least fp32."""

    conv_CK: Tensor
    bias_C: Tensor
    dt_bias_H: Tensor
    A_log_H: Tensor
    D_H: Tensor
    norm_F: Tensor


class Mamba2(Layer):
    """This rank's heads of a mixer.

    Args:
        selective: convolution, scan and norm are computed again in backward, whatever kernels compute them.
    """

    def __init__(self, shape: MixerShape, parallel: Parallel, *, kernels: Kernels, selective: bool = False) -> None:
        super().__init__()
        tp, self.shape, self.kernels = parallel.tp.size, shape, kernels
        self._again = selective or kernels.chunk_scan is chunk_scan
        self.heads, self.groups = shape.num_heads // tp, shape.num_groups // tp
        self.inner, self.convolved = shape.inner // tp, shape.convolved // tp
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.empty(self.heads)) for _ in range(3))
        self.in_proj = Linear(shape.width, shape.projected // tp, parallel=parallel, bias=False, column=True)
        self.conv1d = Convolution(self.convolved, shape.conv_kernel)
        self.norm = GatedNorm(self.inner)
        self.out_proj = Linear(self.inner, shape.width, parallel=parallel, bias=False, column=False)

    def forward(self, u_ND: Tensor, sequences: Sequences) -> Tensor:
        projected_NE, weights = self.in_proj(u_ND), self._weights()
        if sequences.states is not None:
            return self.out_proj(self._generate(projected_NE, weights, sequences.states))
        document_BS = None
        if sequences.documents is not None:
            document_BS = sequences.documents.numbers(sequences.batch, sequences.row_length)
        projected_BSE = projected_NE.view(sequences.batch, sequences.length, -1)
        mix = functools.partial(self._mix, document_BS, sequences.context)
        mixed_BSF = keep_input(mix, projected_BSE, *weights) if self._again else mix(projected_BSE, *weights)
        return self.out_proj(mixed_BSF.flatten(0, 1))

    def _weights(self) -> _Weights:
        conv, small = self.conv1d, ((self, "dt_bias"), (self, "A_log"), (self, "D"))
        conv_C1K, *others = as_inputs((conv, "weight"), (conv, "bias"), *small, (self.norm, "weight"))
        return _Weights(conv_C1K.squeeze(1), *others)

    def _mix(
        self, document_BS: Tensor | None, context: ContextRows | None, projected_BSE: Tensor, *parts: Tensor
    ) -> Tensor:
        """From the first projection's output to the second's input: [B, S, F].

        With context parallelism the documents are those of whole rows, and the two chunks of a row become two rows.
        """
        weights, chunks = _Weights(*parts), None
        if context is not None:
            chunks = RowChunks(context.cp, document_BS)
            document_BS, projected_BSE = chunks.document_RS, chunks.split(projected_BSE)
        z_BSF, xBC_BSC, dt_BSH = self._split(projected_BSE)
        xBC_BSC = self._convolved(xBC_BSC, weights, document_BS, chunks)
        x_BSHP, B_BSGN, C_BSGN = self._parts(xBC_BSC)
        delta_BSH, A_H = self._delta(dt_BSH, weights), -weights.A_log_H.exp()
        y_BSHP, _ = self.kernels.chunk_scan(
            x_BSHP, delta_BSH, A_H, B_BSGN, C_BSGN, chunk=self.shape.chunk_size, document_BS=document_BS
        )
        if chunks is not None:
            added_BHPN, log_BH = end_state(x_BSHP, delta_BSH, A_H, B_BSGN, document_BS=document_BS)
            state_BHPN = chunks.states_before(added_BHPN, log_BH)
            y_BSHP = y_BSHP + read_state(state_BHPN, delta_BSH, A_H, C_BSGN, same_BS=chunks.follows())
        return self._gated(y_BSHP, x_BSHP, z_BSF, weights)

    def _convolved(
        self, xBC_BSC: Tensor, weights: _Weights, document_BS: Tensor | None, chunks: RowChunks | None
    ) -> Tensor:
        convolve = functools.partial(self.kernels.causal_conv, weight_CK=weights.conv_CK, bias_C=weights.bias_C)
        if chunks is None:
            return convolve(xBC_BSC, document_BS=document_BS)
        count = self.shape.conv_kernel - 1
        xBC_BTC = torch.cat((chunks.tokens_before(xBC_BSC, count), xBC_BSC), 1)
        if document_BS is not None:
            document_BS = torch.cat((chunks.documents_before(count), document_BS), 1)
        return convolve(xBC_BTC, document_BS=document_BS)[:, count:]

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """z; x, B and C; the steps."""
        return projected.split([self.inner, self.convolved, self.heads], -1)

    def _parts(self, xBC: Tensor) -> tuple[Tensor, ...]:
        """x, B and C by heads and groups."""
        size = self.groups * self.shape.state_size
        x, B, C = xBC.split([self.inner, size, size], -1)
        return x.unflatten(-1, (self.heads, -1)), B.unflatten(-1, (self.groups, -1)), C.unflatten(-1, (self.groups, -1))

    def _delta(self, dt: Tensor, weights: _Weights) -> Tensor:
        return self.kernels.step_sizes(dt, weights.dt_bias_H, self.shape.dt_limit)

    def _gated(self, y: Tensor, x: Tensor, z: Tensor, weights: _Weights) -> Tensor:
        """The norm of (y + D x) silu(z), of each group: [..., F]."""
        norm, epsilon = self.kernels.gated_norm, self.shape.norm_epsilon
        return norm(y, x, z, weights.D_H, weights.norm_F, groups=self.groups, epsilon=epsilon)

    # ---- generation

    def _generate(self, projected_NE: Tensor, weights: _Weights, states: RowStates) -> Tensor:
        """The same for new tokens of rows, whose states are read and written."""
        if not states.counts:
            return self._step(projected_NE, weights, states)
        parts = projected_NE.split(states.counts)
        rows = zip(parts, states.slot_B, states.starts, strict=True)
        return torch.cat([self._prefill(part, weights, states, slot_1, start) for part, slot_1, start in rows])

    def _prefill(self, part_SE: Tensor, weights: _Weights, states: RowStates, slot: Tensor, start: int) -> Tensor:
        """The next tokens of one row."""
        slot_1, conv, state = slot[None], states.tensors["conv"], states.tensors["state"]
        z_SF, xBC_SC, dt_SH = self._split(part_SE)
        before_1KC = (conv[slot_1] if start else torch.zeros_like(conv[:1])).transpose(1, 2)
        convolved_1SC = self.kernels.causal_conv(
            xBC_SC[None], weights.conv_CK, weights.bias_C, before_BKC=before_1KC if start else None
        )
        x_1SHP, B_1SGN, C_1SGN = self._parts(convolved_1SC)
        delta_1SH, A_H = self._delta(dt_SH[None], weights), -weights.A_log_H.exp()
        y_1SHP, after_1HPN = self.kernels.chunk_scan(
            x_1SHP,
            delta_1SH,
            A_H,
            B_1SGN,
            C_1SGN,
            chunk=self.shape.chunk_size,
            state_BHPN=state[slot_1] if start else None,
        )
        state.index_copy_(0, slot_1, after_1HPN.to(state.dtype))
        conv.index_copy_(0, slot_1, torch.cat((before_1KC, xBC_SC[None]), 1)[:, -conv.shape[2] :].transpose(1, 2))
        return self._gated(y_1SHP[0], x_1SHP[0], z_SF, weights)

    def _step(self, projected_BE: Tensor, weights: _Weights, states: RowStates) -> Tensor:
        """One token of each row."""
        conv, state, slot_B = states.tensors["conv"], states.tensors["state"], states.slot_B
        z_BF, xBC_BC, dt_BH = self._split(projected_BE)
        window_BCK = torch.cat((conv[slot_B], xBC_BC[..., None]), -1)
        convolved_BC = F.silu((window_BCK.to(weights.conv_CK.dtype) * weights.conv_CK).sum(-1) + weights.bias_C)
        x_BHP, B_BGN, C_BGN = self._parts(convolved_BC.to(xBC_BC.dtype))
        delta_BH, A_H = self._delta(dt_BH, weights), -weights.A_log_H.exp()
        y_BHP, after_BHPN = scan_step(x_BHP, delta_BH, A_H, B_BGN, C_BGN, state_BHPN=state[slot_B])
        conv.index_copy_(0, slot_B, window_BCK[..., 1:])
        state.index_copy_(0, slot_B, after_BHPN)
        return self._gated(y_BHP, x_BHP, z_BF, weights)
