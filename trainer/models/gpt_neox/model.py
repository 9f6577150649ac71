"""GPT-NeoX's forward pass: a GPT with another block. Shapes as in models/gpt/model.py."""

from __future__ import annotations

from torch import Tensor

from trainer.models.gpt.model import GPT, Block, Context


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(other_norm(x)); the next norm computes the sum."""

    def forward(self, x_ND: Tensor, branch_ND: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        """See `Block`."""
        sequences, places = context
        x_ND, y_ND = self.attention_norm(x_ND, branch_ND)
        with self._recomputed(self.attention_norm, x_ND, y_ND):
            attended_ND = self.drop_attention(self.attention(y_ND, sequences), places)
        x_ND, y_ND = self.mlp_norm(x_ND)
        with self._recomputed(self.mlp_norm, x_ND, y_ND):
            branch_ND = self.mlp(y_ND, recompute=self.selective)
        return x_ND, attended_ND + self.drop_mlp(branch_ND, places)


class GPTNeoX(GPT):
    """A GPT of these blocks."""

    block_type = ParallelBlock
