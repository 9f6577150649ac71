"""GPT-NeoX's forward pass: a GPT with another block. Shapes as in models/gpt/model.py."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.config.sections import RunConfig
from trainer.kernels.table import Kernels
from trainer.layers.base import Parallel
from trainer.models.gpt.model import GPT, Block, Context, build_gpt, entered
from trainer.models.gpt_neox import GPTNeoXShape
from trainer.parallel.collectives import Group
from trainer.parallel.params import Place


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
    """A GPT of these blocks."""

    block_type = ParallelBlock


def build_gpt_neox(
    shape: GPTNeoXShape,
    place: Place,
    *,
    groups: Mapping[str, Group],
    dtype: torch.dtype,
    device: torch.device,
    config: RunConfig | None = None,
    allocate: bool = True,
) -> GPT:
    """See `build_gpt`."""
    model = Cohere if shape.shared_norm else GPTNeoX if shape.parallel_residual else GPT
    return build_gpt(
        shape, place, groups=groups, dtype=dtype, device=device, config=config, allocate=allocate, model=model
    )
