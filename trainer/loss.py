"""Cross entropy over a vocabulary that is cut over tensor-parallel ranks.

No rank ever holds a whole row of logits: the largest logit, the sum of exponentials and the label's logit are each
one reduction of [tokens] numbers over tp (Shoeybi et al. 2019, section 3). Rows of vocabulary padding take no part,
so the loss does not depend on how many there are. Computed in at least fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.collectives import Axis, all_reduce_


def vocabulary_cross_entropy(logits_NV: Tensor, labels_N: Tensor, *, first: int, stop: int, tp: Axis) -> Tensor:
    """-log softmax(logits)[label] of each token, in nats.

    Args:
        logits_NV: this rank's columns, padding included; column j is token id first + j.
        labels_N: int64, ids of the whole vocabulary.
        first: the first id this rank holds. stop: one past the last; columns from stop - first on are padding.
        tp: the axis that the vocabulary is cut over.

    Returns:
        fp32[N] (fp64 for fp64 logits), equal on every rank of the axis.
    """
    return _CrossEntropy.apply(logits_NV, labels_N, first, stop, tp)


class _CrossEntropy(torch.autograd.Function):
    """Forward: three reductions over tp. Backward: (softmax - one hot) * grad, local."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, first: int, stop: int, tp: Axis) -> Tensor:
        real = stop - first
        dtype = torch.promote_types(logits_NV.dtype, torch.float32)
        x_NV = logits_NV[:, :real].to(dtype)
        # A rank whose rows are all padding still takes part in the reductions.
        top_N = x_NV.amax(dim=1) if real else x_NV.new_full((len(x_NV),), -torch.inf)
        x_NV = x_NV - all_reduce_(top_N, tp, op="max").unsqueeze(1)
        mine_N = (labels_N >= first) & (labels_N < stop)
        column_N = torch.where(mine_N, labels_N - first, 0)
        label_N = x_NV.new_zeros(len(x_NV))
        if real:
            label_N = torch.where(mine_N, x_NV.gather(1, column_N.unsqueeze(1)).squeeze(1), 0.0)
        probability_NV = x_NV.exp()
        total_N = probability_NV.sum(dim=1)
        # One message for both sums.
        total_N, label_N = all_reduce_(torch.stack((total_N, label_N)), tp).unbind(0)
        probability_NV /= total_N.unsqueeze(1)
        ctx.save_for_backward(probability_NV, mine_N, column_N)
        ctx.columns, ctx.dtype = logits_NV.shape[1], logits_NV.dtype
        return total_N.log() - label_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None, None]:
        probability_NV, mine_N, column_N = ctx.saved_tensors
        grad_NV = probability_NV.clone()
        if grad_NV.shape[1]:
            grad_NV.scatter_add_(1, column_N.unsqueeze(1), -mine_N.to(grad_NV.dtype).unsqueeze(1))
        grad_NV *= grad_N.unsqueeze(1)
        padding = ctx.columns - grad_NV.shape[1]
        return torch.nn.functional.pad(grad_NV, (0, padding)).to(ctx.dtype), None, None, None, None
