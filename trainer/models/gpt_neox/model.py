"""GPT-NeoX's forward pass: a GPT with another block. Shapes as in models/gpt/model.py."""

from __future__ import annotations

from torch import Tensor

from trainer.models.gpt.model import GPT, Block, Context


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(other_norm(x)); the next norm computes the sum."""

    def forward(self, x_ND: Tensor, branch_ND: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """See `Block`."""
        x_ND, attended_ND = self.attend(x_ND, branch_ND, context)
        x_ND, branch_ND = self.feed_forward(x_ND, None, context)
        return x_ND, attended_ND + branch_ND


class GPTNeoX(GPT):
    """A GPT of these blocks."""

    block_type = ParallelBlock
