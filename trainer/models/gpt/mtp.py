"""Multi-token prediction (DeepSeek-AI 2024, "DeepSeek-V3"): further blocks on the last stage predict later tokens.

Depth k reads the hidden states of the depth before, the first one those of the last norm, beside the embeddings of the
tokens k places later, and predicts the labels k places later with the model's own head. Later tokens are those of the
same document, under context parallelism too: rows of whole numbers are gathered over cp first. Positions stay.

The head computes its gradient in the forward pass, so weights of tokens say how the loss counts: with a mean over the
depth's own tokens of the step, times the step's loss tokens, so that it comes out as a mean after the later division;
those of the microbatch where the step's are not known (NamedLoss in models/stage.py).

Shapes: B rows, S tokens of a row on this rank, T of the whole row, N = B * S tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.kernels.table import Kernels
from trainer.layers.attention import Documents
from trainer.layers.base import Parallel
from trainer.layers.context_rows import gather_rows
from trainer.layers.dropout import Dropout
from trainer.layers.linear import Linear
from trainer.layers.norm import Norm
from trainer.models.gpt.shape import GPTShape
from trainer.models.stage import Microbatch
from trainer.parallel.collectives import Group
from trainer.parallel.conjugates import reduce_from_group, scatter_sequence


class LaterTokens(NamedTuple):
    """What one depth reads and predicts.

    Args:
        tokens_N, labels_N: int64; 0 where there is none. weight_N: of each token's loss, see above.
    """

    tokens_N: Tensor
    labels_N: Tensor
    weight_N: Tensor


def later_tokens(batch: Microbatch, names: Sequence[str], *, factor: float, cp: Group) -> Iterator[LaterTokens]:
    """Those of each depth, on this rank.

    Args:
        names: of the depths' losses. factor: of the mean of these.
    """
    mine_S, sums = batch.columns_S, batch.of_step
    tokens_BT, labels_BT, mask_BT = _whole_rows(
        batch, batch.tokens_BS, batch.labels_BS, batch.loss_mask_BS.double(), cp=cp
    )
    for depth, name in enumerate(names, 1):
        later_BT = _later(batch, depth, *mask_BT.shape)
        weight_BT = later_BT(mask_BT)
        n, counted = (mask_BT.sum(), weight_BT.sum()) if sums is None else (sums.tokens, sums.weights[name])
        weight_BT = weight_BT * torch.where(counted > 0, factor / len(names) * n / counted, 0.0)
        whole_rows = (later_BT(tokens_BT), later_BT(labels_BT), weight_BT)
        yield LaterTokens(*((x_BT if mine_S is None else x_BT[:, mine_S]).flatten() for x_BT in whole_rows))


def later_counts(batch: Microbatch, depths: int, *, cp: Group) -> list[Tensor]:
    """The sum of the mask over what each depth predicts, in whole rows: fp64 scalars."""
    (mask_BT,) = _whole_rows(batch, batch.loss_mask_BS.double(), cp=cp)
    return [_later(batch, depth, *mask_BT.shape)(mask_BT).sum() for depth in range(1, depths + 1)]


def _whole_rows(batch: Microbatch, *of_rank: Tensor, cp: Group) -> tuple[Tensor, ...]:
    return of_rank if batch.columns_S is None else tuple(gather_rows(x_BS, cp=cp) for x_BS in of_rank)


def _later(batch: Microbatch, depth: int, rows: int, length: int) -> Callable[[Tensor], Tensor]:
    """A function that gives each token what is `depth` places later in its document, or 0: [B, T] -> [B, T]."""
    document_BT = torch.arange(rows, device=batch.tokens_BS.device).unsqueeze(1).expand(rows, length)
    if batch.bounds is not None:
        document_BT = Documents(batch.bounds, batch.longest).numbers(rows, length)
    there_BT = F.pad(document_BT[:, depth:] == document_BT[:, :-depth], (0, depth))
    return lambda x_BT: F.pad(x_BT[:, depth:], (0, depth)) * there_BT


class Depth(nn.Module):
    """One depth."""

    def __init__(
        self, shape: GPTShape, parallel: Parallel, *, block: nn.Module, dropout: Dropout, kernels: Kernels
    ) -> None:
        super().__init__()
        width, self.parallel, self.drop_embedding = shape.hidden_size, parallel, dropout
        self.embedding_norm = Norm(width, shape.norm_shape, kernels=kernels)
        self.hidden_norm = Norm(width, shape.norm_shape, kernels=kernels)
        self.project = Linear(2 * width, width // parallel.tp.size, parallel=parallel, bias=False, column=True)
        self.block = block
        self.final_norm = Norm(width, shape.norm_shape, kernels=kernels)

    def read(self, embedded_ND: Tensor, hidden_ND: Tensor) -> Tensor:
        """The residual stream that enters the block."""
        both = torch.cat((self.embedding_norm(embedded_ND)[1], self.hidden_norm(hidden_ND)[1]), dim=-1)
        part_ND, tp = self.project(both), self.parallel.tp
        if tp.size == 1:
            return part_ND
        # Each rank has some of the features of all tokens; a sum with zeros puts them side by side.
        width = part_ND.shape[1]
        wide_ND = F.pad(part_ND, (tp.rank * width, (tp.size - 1 - tp.rank) * width))
        leave = scatter_sequence if self.parallel.sequence_parallel else reduce_from_group
        return leave(wide_ND, tp)
