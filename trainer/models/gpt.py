"""GPT: a decoder-only transformer, as its papers draw it.

Covers the GPT-2 form (learned positions, LayerNorm, GELU, biases) and the Llama form (rotary positions, RMSNorm,
SwiGLU, no biases, grouped key-value heads) and what lies between. The forward pass holds no parallel code: the
layers know how to enter and leave a parallel region, and models/gpt_table.py says what each rank holds.

Shapes: S sequence, B batch, D hidden, V local vocabulary rows, N = S * B tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.collectives import Axis
from trainer.layers import MLP, Attention, Parallel, VocabularyEmbedding, make_norm, rotation_table
from trainer.loss import vocabulary_cross_entropy
from trainer.models.gpt_table import GPTShape


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, shape: GPTShape, parallel: Parallel) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape)
        self.attention = Attention(shape, parallel)
        self.mlp_norm = make_norm(shape)
        self.mlp = MLP(shape, parallel)

    def forward(self, x_SBD: Tensor, rotation_SK: Tensor | None) -> Tensor:
        x_SBD = x_SBD + self.attention(self.attention_norm(x_SBD), rotation_SK)
        return x_SBD + self.mlp(self.mlp_norm(x_SBD))


class GPT(nn.Module):
    """One rank's part of the model.

    Args:
        shape: what function it computes.
        tp: the tensor-parallel axis.
        sequence_parallel: activations between the parallel linears hold S / tp positions.
    """

    def __init__(self, shape: GPTShape, tp: Axis, *, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.parallel = Parallel(tp, sequence_parallel=sequence_parallel and tp.size > 1)
        self.embedding = VocabularyEmbedding(shape, self.parallel)
        if shape.position == "learned":
            self.positions = nn.Embedding(shape.max_position, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape, self.parallel) for _ in range(shape.num_layers))
        self.final_norm = make_norm(shape)
        if not shape.tie_embeddings:
            self.head = VocabularyEmbedding(shape, self.parallel)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits of this rank's vocabulary rows, padding included: int64[B, S] -> [S, B, V]."""
        sequence = tokens_BS.shape[1]
        x_SBD = self.embedding(tokens_BS)
        rotation_SK = None
        if self.shape.position == "learned":
            mine = self.parallel.local_positions(sequence)
            x_SBD = x_SBD + self.positions.weight[mine].unsqueeze(1)
        else:
            rotation_SK = rotation_table(
                sequence, self.shape.head_dim, theta=self.shape.rope_theta, device=tokens_BS.device
            )
        for block in self.blocks:
            x_SBD = block(x_SBD, rotation_SK)
        head = self.embedding if self.shape.tie_embeddings else self.head
        return F.linear(self.parallel.enter(self.final_norm(x_SBD)), head.weight)

    def loss_sum(self, tokens_BS: Tensor, labels_BS: Tensor, *, loss_mask_BS: Tensor) -> Tensor:
        """Sum over the unmasked tokens of -log p(label), in nats; a scalar, not divided by anything."""
        logits_SBV = self(tokens_BS)
        labels_N = labels_BS.transpose(0, 1).reshape(-1)
        rows = self.embedding
        loss_N = vocabulary_cross_entropy(
            logits_SBV.flatten(0, 1), labels_N, first=rows.first, stop=rows.stop, tp=self.parallel.tp
        )
        return (loss_N * loss_mask_BS.transpose(0, 1).reshape(-1)).sum()


def build_gpt(shape: GPTShape, tp: Axis, *, sequence_parallel: bool, dtype: torch.dtype, device: torch.device) -> GPT:
    """Allocate a model with uninitialized weights directly in its dtype on its device."""
    with torch.device("meta"):
        model = GPT(shape, tp, sequence_parallel=sequence_parallel)
    return model.to(dtype).to_empty(device=device)
