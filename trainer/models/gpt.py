"""GPT: a decoder-only transformer, as its papers draw it.

Covers the GPT-2 form (learned positions, LayerNorm, GELU, biases) and the Llama form (rotary positions, RMSNorm,
SwiGLU, no biases, grouped key-value heads) and what lies between. The forward pass holds no parallel code: the
layers know how to enter and leave a parallel region, and models/gpt_params.py says what each rank holds.

Shapes: B batch, S sequence, N = B * S tokens, batch-major (N / tp of them between the parallel linears under sequence
parallelism), D hidden, V local vocabulary rows.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from trainer.kernels.table import Kernels, choose_kernels
from trainer.layers.attention import Attention, AttentionShape, Sequences
from trainer.layers.base import Parallel
from trainer.layers.embedding import PositionEmbedding, VocabularyEmbedding
from trainer.layers.head import head_loss
from trainer.layers.linear import column_product
from trainer.layers.mlp import MLP, MLPShape
from trainer.layers.norm import Norm
from trainer.layers.rope import Rotation, rotation
from trainer.models.gpt_params import GPTShape
from trainer.models.stage import Microbatch, Tensors
from trainer.parallel.collectives import Group
from trainer.parallel.params import Place


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); the second sum is left to the next norm."""

    def __init__(self, shape: GPTShape, parallel: Parallel, *, kernels: Kernels) -> None:
        super().__init__()
        self.attention_norm = make_norm(shape, kernels)
        self.attention = Attention(attention_shape(shape), parallel, kernels=kernels)
        self.mlp_norm = make_norm(shape, kernels)
        self.mlp = MLP(mlp_shape(shape), parallel, kernels=kernels)

    def forward(self, x_ND: Tensor, branch_ND: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
        x_ND, y_ND = self.attention_norm(x_ND, branch_ND)
        x_ND, y_ND = self.mlp_norm(x_ND, self.attention(y_ND, sequences))
        return x_ND, self.mlp(y_ND)


class GPT(nn.Module):
    """One rank's part of one pipeline stage of the model.

    Args:
        shape: what function it computes.
        place: which part this is; blocks keep their number in the whole model as their name.
        tp: the tensor-parallel ranks.
        kernels: implementations of the small operations.
    """

    def __init__(self, shape: GPTShape, place: Place, *, tp: Group, kernels: Kernels) -> None:
        super().__init__()
        self.shape, self.place, self.kernels = shape, place, kernels
        self.parallel = Parallel(tp, sequence_parallel=place.sequence_parallel and tp.size > 1)
        if place.is_first or (place.is_last and shape.tie_embeddings):
            self.embedding = self._vocabulary()
        if shape.position == "learned" and place.is_first:
            self.positions = PositionEmbedding(shape.max_position, shape.hidden_size)
        blocks = place.blocks(shape.num_layers)
        self.blocks = nn.ModuleDict({str(i): Block(shape, self.parallel, kernels=kernels) for i in blocks})
        if place.is_last:
            self.final_norm = make_norm(shape, kernels)
            if not shape.tie_embeddings:
                self.head = self._vocabulary()
        self._rotation = functools.lru_cache(maxsize=8)(self._make_rotation)

    def forward(self, received: Tensors, batch: Microbatch) -> Tensors:
        """(residual stream, what the last block adds to it) from stage to stage, each [N or N / tp, D].

        The first stage receives nothing; the last gives the sum over the unmasked tokens of -log p(label), in nats.
        """
        x_ND, branch_ND = received if received else self._enter(batch.tokens_BS)
        x_ND, branch_ND = self._through_blocks(x_ND, branch_ND, batch.tokens_BS)
        if not self.place.is_last:
            assert branch_ND is not None, "a stage without blocks"
            return x_ND, branch_ND
        _, y_ND = self.final_norm(x_ND, branch_ND)
        loss = head_loss(
            y_ND,
            self._head(),
            labels_N=batch.labels_BS.flatten(),
            weight_N=batch.loss_mask_BS.flatten(),
            kernels=self.kernels,
        )
        return (loss,)

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Of a model of one stage, of this rank's vocabulary rows, padding included: int64[B, S] -> [B, S, V]."""
        x_ND, branch_ND = self._through_blocks(*self._enter(tokens_BS), tokens_BS)
        _, y_ND = self.final_norm(x_ND, branch_ND)
        rows = self._head()
        logits_NV = column_product(y_ND, rows, weight=rows.weight, parallel=self.parallel)
        return logits_NV.view(*tokens_BS.shape, -1)

    def _enter(self, tokens_BS: Tensor) -> tuple[Tensor, None]:
        """The first residual stream, to which nothing is added yet."""
        batch, length = tokens_BS.shape
        x_ND = self.embedding(tokens_BS.flatten())
        if self.shape.position == "learned":
            mine = self.parallel.local_tokens(batch * length)
            x_ND = x_ND + self.positions(torch.arange(batch * length, device=tokens_BS.device)[mine] % length)
        return x_ND, None

    def _through_blocks(
        self, x_ND: Tensor, branch_ND: Tensor | None, tokens_BS: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        batch, length = tokens_BS.shape
        table = self._rotation(length, tokens_BS.device) if self.shape.position == "rope" else None
        sequences = Sequences(batch, length, table)
        for block in self.blocks.values():
            x_ND, branch_ND = block(x_ND, branch_ND, sequences)
        return x_ND, branch_ND

    def _vocabulary(self) -> VocabularyEmbedding:
        shape = self.shape
        return VocabularyEmbedding(
            shape.vocab_size, shape.padded_vocab_size, width=shape.hidden_size, parallel=self.parallel
        )

    def _head(self) -> VocabularyEmbedding:
        return self.embedding if self.shape.tie_embeddings else self.head

    def _make_rotation(self, length: int, device: torch.device) -> Rotation:
        dtype = next(self.parameters()).dtype
        return rotation(length, self.shape.head_dim, theta=self.shape.rope_theta, dtype=dtype, device=device)


def attention_shape(shape: GPTShape) -> AttentionShape:
    """What a block's attention has to know of the model."""
    return AttentionShape(
        width=shape.hidden_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        bias=shape.bias,
    )


def mlp_shape(shape: GPTShape) -> MLPShape:
    """What a block's feed-forward layer has to know of the model."""
    return MLPShape(width=shape.hidden_size, inner=shape.ffn_hidden_size, activation=shape.activation, bias=shape.bias)


def make_norm(shape: GPTShape, kernels: Kernels) -> Norm:
    """The norm that the shape names."""
    return Norm(shape.hidden_size, kind=shape.norm, epsilon=shape.norm_epsilon, kernels=kernels)


def build_gpt(shape: GPTShape, place: Place, *, tp: Group, dtype: torch.dtype, device: torch.device) -> GPT:
    """Allocate a stage with uninitialized weights directly in its dtype on its device."""
    with torch.device("meta"):
        model = GPT(shape, place, tp=tp, kernels=choose_kernels(device, dtype))
    # Not to_empty: for tensors without data that imports sympy, 0.4 s in each process.
    return model.to(dtype)._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
