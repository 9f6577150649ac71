"""Embeddings: rows of the vocabulary divided over tp, and learned positions.

Shapes: N tokens, D hidden, V local vocabulary rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.layers.base import Layer, MainGradients, Parallel, add_rows
from trainer.parallel.conjugates import reduce_from_group, scatter_sequence
from trainer.parallel.params import vocabulary_range


class VocabularyEmbedding(Layer):
    """A rank returns zeros for ids of other ranks; the sum over tp is the row.

    Args:
        vocab_size: ids. padded_rows: rows over all ranks. width: D.

    Attributes:
        first, stop: the ids [first, stop) whose rows this rank holds; rows after them are padding.
    """

    def __init__(self, vocab_size: int, padded_rows: int, *, width: int, parallel: Parallel) -> None:
        super().__init__()
        tp, self.parallel = parallel.tp, parallel
        self.first, self.stop = vocabulary_range(vocab_size, padded_rows, tp_size=tp.size, tp_rank=tp.rank)
        self.weight = nn.Parameter(torch.empty(padded_rows // tp.size, width))

    def forward(self, tokens_N: Tensor) -> Tensor:
        """Rows of the tokens that this rank holds: int64[N] -> [N or N / tp, D]."""
        if self.parallel.tp.size == 1:
            return _Rows.apply(self.weight, tokens_N, None, self.main_gradients)
        mine_N = self.local(tokens_N)
        x_ND = _Rows.apply(self.weight, torch.where(mine_N, tokens_N - self.first, 0), mine_N, self.main_gradients)
        leave = scatter_sequence if self.parallel.sequence_parallel else reduce_from_group
        return leave(x_ND, self.parallel.tp)

    def local(self, ids_N: Tensor) -> Tensor:
        """Which ids this rank holds: bool[N]."""
        return (ids_N >= self.first) & (ids_N < self.stop)


class PositionEmbedding(Layer):
    """Learned positions: row s for position s."""

    def __init__(self, num_positions: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions, width))

    def forward(self, positions_N: Tensor) -> Tensor:
        return _Rows.apply(self.weight, positions_N, None, self.main_gradients)


class _Rows(torch.autograd.Function):
    """Rows of a table, zeros if the mask is false; the gradient is added to the table's rows."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows_N: Tensor, mine_N: Tensor | None, main: MainGradients) -> Tensor:
        ctx.save_for_backward(table, rows_N, mine_N)
        ctx.main = main
        x_ND = F.embedding(rows_N, table)
        return x_ND if mine_N is None else x_ND.mul_(mine_N.unsqueeze(1))

    @staticmethod
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor | None, None, None, None]:
        if "weight" in ctx.main.frozen:
            return None, None, None, None
        table, rows_N, mine_N = ctx.saved_tensors
        dy_ND = dy_ND if mine_N is None else dy_ND * mine_N.unsqueeze(1)
        return add_rows(ctx.main.get("weight"), rows_N, dy_ND=dy_ND, like=table), None, None, None
