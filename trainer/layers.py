"""Layers that compute one rank's share of a tensor-parallel GPT.

A layer is an ordinary module given its local widths and a tp `Axis`; which rank holds what is the parameter table's
business (models/gpt_table.py). Activations are [S, B, D]: sequence first, so that sequence parallelism cuts and
joins along dim 0 without a copy. With sequence parallelism everything between the parallel linears sees S / tp
positions, and the linears gather and scatter; without it they copy and reduce.

Shapes: S sequence, B batch, D hidden, H local heads, G local key-value heads, K head dim, F local feed-forward,
V local vocabulary rows. A local shard keeps its letters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.collectives import (
    Axis,
    copy_to_axis,
    gather_sequence,
    reduce_from_axis,
    scatter_sequence,
)
from trainer.models.gpt_table import GPTShape, vocabulary_range


class Parallel:
    """How activations enter and leave a parallel region: one tp axis, with or without sequence parallelism."""

    def __init__(self, tp: Axis, *, sequence_parallel: bool) -> None:
        self.tp, self.sequence_parallel = tp, sequence_parallel

    def enter(self, x_SBD: Tensor) -> Tensor:
        """Give every rank the whole sequence; backward sums what the ranks contribute."""
        return (gather_sequence if self.sequence_parallel else copy_to_axis)(x_SBD, self.tp)

    def leave(self, partial_SBD: Tensor) -> Tensor:
        """Sum the ranks' partial results; under sequence parallelism keep this rank's positions."""
        return (scatter_sequence if self.sequence_parallel else reduce_from_axis)(partial_SBD, self.tp)

    def local_positions(self, sequence_length: int) -> slice:
        """The positions this rank holds outside the parallel regions."""
        if not self.sequence_parallel:
            return slice(0, sequence_length)
        part = sequence_length // self.tp.size
        return slice(self.tp.rank * part, (self.tp.rank + 1) * part)


class ColumnLinear(nn.Module):
    """y = x W^T + b with the outputs cut over tp: [S, B, D] -> [S, B, outputs / tp], the whole sequence."""

    def __init__(self, inputs: int, local_outputs: int, *, parallel: Parallel, bias: bool) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = nn.Parameter(torch.empty(local_outputs, inputs))
        self.bias = nn.Parameter(torch.empty(local_outputs)) if bias else None

    def forward(self, x_SBD: Tensor) -> Tensor:
        return F.linear(self.parallel.enter(x_SBD), self.weight, self.bias)


class RowLinear(nn.Module):
    """y = x W^T + b with the inputs cut over tp: [S, B, inputs / tp] -> [S, B, D]; the bias is added once."""

    def __init__(self, local_inputs: int, outputs: int, *, parallel: Parallel, bias: bool) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = nn.Parameter(torch.empty(outputs, local_inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y_SBD = self.parallel.leave(F.linear(x, self.weight))
        return y_SBD if self.bias is None else y_SBD + self.bias


class VocabularyEmbedding(nn.Module):
    """Rows of the vocabulary cut over tp; an id of another rank gives zeros, and the sum over tp the row."""

    def __init__(self, shape: GPTShape, parallel: Parallel) -> None:
        super().__init__()
        tp = parallel.tp
        self.parallel = parallel
        self.first, self.stop = vocabulary_range(shape, tp_size=tp.size, tp_rank=tp.rank)
        self.weight = nn.Parameter(torch.empty(shape.padded_vocab_size // tp.size, shape.hidden_size))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        mine_BS = (tokens_BS >= self.first) & (tokens_BS < self.stop)
        rows_BS = torch.where(mine_BS, tokens_BS - self.first, 0)
        x_BSD = F.embedding(rows_BS, self.weight) * mine_BS.unsqueeze(-1)
        return self.parallel.leave(x_BSD.transpose(0, 1).contiguous())


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019), the mean square in at least fp32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias (Ba et al. 2016)."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


def make_norm(shape: GPTShape) -> nn.Module:
    """The norm that the shape names."""
    kind = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}[shape.norm]
    return kind(shape.hidden_size, shape.norm_epsilon)


class Attention(nn.Module):
    """Causal self-attention with H query heads over G key-value heads (Ainslie et al. 2023 for G < H)."""

    def __init__(self, shape: GPTShape, parallel: Parallel) -> None:
        super().__init__()
        tp, width, self.head_dim = parallel.tp.size, shape.hidden_size, shape.head_dim
        self.heads, self.kv_heads = shape.num_heads // tp, shape.num_kv_heads // tp
        inner = self.heads * self.head_dim
        local_outputs = inner + 2 * self.kv_heads * self.head_dim
        self.qkv = ColumnLinear(width, local_outputs, parallel=parallel, bias=shape.bias)
        self.out = RowLinear(inner, width, parallel=parallel, bias=shape.bias)

    def forward(self, x_SBD: Tensor, rotation_SK: Tensor | None) -> Tensor:
        qkv = self.qkv(x_SBD)
        sequence, batch = qkv.shape[:2]
        sizes = [self.heads, self.kv_heads, self.kv_heads]
        heads = qkv.view(sequence, batch, sum(sizes), self.head_dim).permute(1, 2, 0, 3)
        q_BHSK, k_BGSK, v_BGSK = heads.split(sizes, dim=1)
        if rotation_SK is not None:
            q_BHSK, k_BGSK = rotate(q_BHSK, rotation_SK), rotate(k_BGSK, rotation_SK)
        y_BHSK = F.scaled_dot_product_attention(
            q_BHSK, k_BGSK, v_BGSK, is_causal=True, enable_gqa=self.kv_heads != self.heads
        )
        return self.out(y_BHSK.permute(2, 0, 1, 3).reshape(sequence, batch, -1))


class MLP(nn.Module):
    """Feed-forward: SwiGLU (Shazeer 2020) with gate and up in one product, or GELU, exact or by tanh (as GPT-2)."""

    def __init__(self, shape: GPTShape, parallel: Parallel) -> None:
        super().__init__()
        tp, width = parallel.tp.size, shape.hidden_size
        inner = shape.ffn_hidden_size // tp
        self.gated = shape.gated
        self.approximation = "none" if shape.activation == "gelu_erf" else "tanh"
        self.up = ColumnLinear(width, inner * (2 if self.gated else 1), parallel=parallel, bias=shape.bias)
        self.down = RowLinear(inner, width, parallel=parallel, bias=shape.bias)

    def forward(self, x_SBD: Tensor) -> Tensor:
        up = self.up(x_SBD)
        if not self.gated:
            return self.down(F.gelu(up, approximate=self.approximation))
        gate_SBF, up_SBF = up.chunk(2, dim=-1)
        return self.down(F.silu(gate_SBF) * up_SBF)


def rotation_table(sequence_length: int, head_dim: int, *, theta: float, device: torch.device) -> Tensor:
    """Angles of rotary positions (Su et al. 2021): fp64[S, K / 2]."""
    frequency = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    position = torch.arange(sequence_length, dtype=torch.float64, device=device)
    return torch.outer(position, frequency)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate pairs (i, i + K/2) of the last dim of [B, H, S, K] by the angles [S, K / 2] (Llama's pairing)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)
