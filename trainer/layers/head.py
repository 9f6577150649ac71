"""The output head and its loss together: logits of a chunk of tokens, their loss and its gradient, chunk after chunk.

Full logits never exist, neither over all tokens nor over the whole vocabulary: with tp ranks, the largest logit, and
the sum of exponentials with the label's logit, are two reductions of one number per token (Shoeybi et al. 2019, section
3). The gradient is computed in the forward pass, which is possible because the loss is a plain sum, whose own gradient
is 1. Padding is excluded. Loss and softmax are computed in at least fp32.

A loss of sequences (models/preferences.py) is a function of the sum of each sequence. The chunks then run twice: once
for the sums, which are reduced over the ranks that share rows, and, with the loss's gradient by these as the tokens'
weights, once for the gradients.

Shapes: N tokens, C of a chunk, D hidden, V local vocabulary rows, padding included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.kernels.plain import add_product
from trainer.kernels.table import Kernels
from trainer.layers.base import Layer, Parallel, add_bias_gradient, add_weight_gradient
from trainer.layers.embedding import VocabularyEmbedding
from trainer.parallel.collectives import Group, all_reduce_

CHUNK_TOKENS = 2048  # limits the logits that exist at the same time; 4,096 were no faster (docs/design/one-gpu.md)


class VocabularyBias(Layer):
    """What is added to the logits of this rank's vocabulary rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(rows))


class SequenceLoss(NamedTuple):
    """A loss of sequences of tokens.

    Args:
        number_N: int64, the sequence of each token, ascending. num_sequences: how many there are. cp: ranks that share
            rows.
        loss: the weighted sums of -log p of all sequences, fp64 -> (losses of tokens, [N], whose sum is the loss; the
            gradient of the loss of all ranks' tokens by these sums, fp64).
    """

    number_N: Tensor
    num_sequences: int
    cp: Group
    loss: Callable[[Tensor], tuple[Tensor, Tensor]]


def sequence_sums(values_N: Tensor, number_N: Tensor, count: int) -> Tensor:
    """The sum of each sequence's values: fp64[count]. Not index_add_, whose order on a GPU differs between runs."""
    sums = F.pad(values_N.cumsum(0, dtype=torch.float64), (1, 0))
    ends = torch.searchsorted(number_N, torch.arange(count, device=number_N.device), right=True)
    return torch.diff(sums[ends], prepend=sums[:1])


def head_loss(
    x_ND: Tensor,
    rows: VocabularyEmbedding,
    *,
    labels_N: Tensor,
    weight_N: Tensor,
    kernels: Kernels,
    chunk_tokens: int = CHUNK_TOKENS,
    softcap: float = 0.0,
    bias: VocabularyBias | None = None,
    parallel: Parallel | None = None,
    sequences: SequenceLoss | None = None,
) -> tuple[Tensor, Tensor]:
    """weight * -log softmax(x W^T + b)[label], in nats: the sum over all tokens, and each token's.

    Equal on every tp rank.

    Args:
        x_ND: output of the last norm, this rank's tokens.
        rows: the layer whose weight is W.
        labels_N: int64, all tokens. weight_N: the loss mask, all tokens.
        chunk_tokens: tokens whose logits exist at the same time; affects only memory and speed.
        softcap: c of c tanh(logit / c); 0: off. bias: b; None: there is none.
        parallel: how x is divided over tp; None: as the embedding's output.
        sequences: the loss is a function of the sums of these; None: it is the sum of all.

    Returns:
        fp64 scalar; at least fp32[N], without a gradient.

    The forward pass adds to the main gradients of W and b, for a loss with factor 1: a caller that multiplies the
    loss before backward has to use a model without main gradients.
    """
    options = _Options(
        kernels, torch.is_grad_enabled(), chunk_tokens, softcap, bias, parallel or rows.parallel, sequences
    )
    bias_V = None if bias is None else bias.bias
    loss, losses_N = _HeadLoss.apply(x_ND, rows.weight, bias_V, labels_N, weight_N, rows, options)
    return loss, losses_N


class _Options(NamedTuple):
    kernels: Kernels
    train: bool
    chunk_tokens: int
    softcap: float
    bias: VocabularyBias | None
    parallel: Parallel
    sequences: SequenceLoss | None


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        weight_N: Tensor,
        rows: VocabularyEmbedding,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        kernels, train, chunk, cap, bias, parallel, sequences = options
        x_ND = parallel.gather(x_ND)
        column_N = torch.where(rows.local(labels_N), labels_N - rows.first, -1)
        loss, losses = torch.zeros((), dtype=torch.float64, device=x_ND.device), []
        parts = [slice(first, first + chunk) for first in range(0, len(x_ND) or 1, chunk)]

        def logits(part: slice) -> Tensor:
            logits_CV = F.linear(x_ND[part], weight_VD, bias_V)
            return capped(logits_CV, cap) if cap else logits_CV

        if sequences is not None:
            nats = [_log_total(logits(part), column_N[part], rows, kernels)[0] * weight_N[part] for part in parts]
            sums_K = sequence_sums(torch.cat(nats), sequences.number_N, sequences.num_sequences)
            losses_N, slope_K = sequences.loss(all_reduce_(sums_K, sequences.cp))
            loss, losses = losses_N.sum(dtype=torch.float64), [losses_N]
            weight_N = weight_N * slope_K[sequences.number_N]
            parts = parts if train else []
        main = rows.main_gradients
        dx_ND = torch.empty_like(x_ND) if train else None
        returned = train and "weight" not in main.frozen and "weight" not in main.tensors
        own = torch.zeros_like(weight_VD, dtype=_wide(weight_VD)) if returned else None
        own_bias = None
        for part in parts:
            logits_CV = logits(part)
            if cap:
                slope_CV = 1 - (logits_CV / cap).square()
            log_total_C = _log_total(logits_CV, column_N[part], rows, kernels)
            if sequences is None:
                losses.append(log_total_C[0] * weight_N[part])
                loss += losses[-1].sum(dtype=torch.float64)
            if dx_ND is not None:
                real = rows.stop - rows.first
                kernels.logits_to_gradient_(logits_CV, log_total_C[1], column_N[part], weight_N[part], real)
                if cap:
                    logits_CV *= slope_CV
                torch.mm(logits_CV, weight_VD, out=dx_ND[part])
                if own is not None:
                    add_product(own, logits_CV, x_NI=x_ND[part])
                else:
                    add_weight_gradient(main, "weight", dy_NO=logits_CV, x_NI=x_ND[part])
                if bias is not None and (dbias := add_bias_gradient(bias.main_gradients, logits_CV)) is not None:
                    own_bias = dbias.to(_wide(dbias)) if own_bias is None else own_bias + dbias
            del logits_CV  # before those of the next chunk exist
        # Summed here, so that under sequence parallelism only this rank's tokens are kept until backward.
        ctx.save_for_backward(None if dx_ND is None else parallel.reduce(dx_ND), own, own_bias)
        ctx.dtype = weight_VD.dtype
        losses_N = torch.cat(losses)
        ctx.mark_non_differentiable(losses_N)
        return loss, losses_N

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dx_ND, *own = ctx.saved_tensors
        dweight, dbias = (None if x is None else (x * grad.to(x.dtype)).to(ctx.dtype) for x in own)
        return dx_ND * grad.to(dx_ND.dtype), dweight, dbias, None, None, None, None


def capped(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), computed in at least fp32 (Gemma 2); the logits themselves if cap is 0."""
    return ((logits.to(_wide(logits)) / cap).tanh() * cap).to(logits.dtype) if cap else logits


def _log_total(
    logits_CV: Tensor, column_C: Tensor, rows: VocabularyEmbedding, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """(-log softmax of the label, log of the sum of exponentials) of each token, over the whole vocabulary."""
    tp = rows.parallel.tp
    top_C, total_C, label_C = kernels.logit_statistics(logits_CV, column_C, rows.stop - rows.first)
    if tp.size > 1:
        whole_C = all_reduce_(top_C.clone(), tp, op="max")
        total_C, label_C = all_reduce_(torch.stack((total_C * (top_C - whole_C).exp(), label_C)), tp).unbind(0)
        top_C = whole_C
    log_total_C = total_C.log() + top_C
    return log_total_C - label_C, log_total_C


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
