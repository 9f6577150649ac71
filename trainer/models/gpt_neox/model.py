"""GPT-NeoX's forward pass: a GPT with another block. Shapes as in models/gpt/model.py."""

from __future__ import annotations

import functools

from torch import Tensor

from trainer.kernels.table import Kernels
from trainer.layers.base import Parallel
from trainer.models.gpt.model import GPT, Block, Context, build_gpt, entered
from trainer.models.gpt_neox import GPTNeoXShape


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(other_norm(x)); the next norm computes the sum."""

    def forward(self, x_ND: Tensor, branch_ND: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """See `Block`."""
        x_ND, attended_ND = self.attend(x_ND, branch_ND, context)
        x_ND, branch_ND = self.feed_forward(x_ND, None, context)
        return x_ND, attended_ND + branch_ND


class SharedNormBlock(Block):
    """x + attention(norm(x)) + mlp(norm(x)), with one norm."""

    def __init__(
        self, shape: GPTNeoXShape, parallel: Parallel, *, number: int, kernels: Kernels, seed: int, selective: bool
    ) -> None:
        super().__init__(shape, parallel, number=number, kernels=kernels, seed=seed, selective=selective)
        self.mlp_norm = None

    def forward(self, x_ND: Tensor, branch_ND: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """See `Block`."""
        x_ND, y_ND = entered(self.attention_norm, x_ND, branch_ND)
        with self.recomputed(self.attention_norm, x_ND, y_ND):
            attended_ND = self.attention_branch(y_ND, context)
            return x_ND, attended_ND + self.mlp_branch(y_ND, context)


class Cohere(GPT):
    """A GPT of blocks with one norm."""

    block_type = SharedNormBlock


class GPTNeoX(GPT):
    """A GPT of parallel blocks."""

    block_type = ParallelBlock

    @classmethod
    def class_for(cls, shape: GPTNeoXShape) -> type[GPT]:
        """See `GPT`."""
        return Cohere if shape.shared_norm else cls if shape.parallel_residual else GPT


build_gpt_neox = functools.partial(build_gpt, model=GPTNeoX)
