"""Attention that PyTorch's fused kernels for whole causal rows cannot serve, on a GPU.

Documents inside rows go to variable-length flash attention where the dtype allows; everything else to FlexAttention,
compiled once for each set of options (Dong et al. 2024). Dropout of weights is left to the plain path, which holds all
scores. Each function has the signature of its plain twin.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.kernels import plain
from trainer.kernels.plain import DocumentBounds, ScoreTensors
from trainer.kernels.scores import ScoreShape

FLEX_VARIANTS = 64  # lengths and options that are compiled, before PyTorch falls back to whole matrices of scores


def document_attention(
    q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, documents: DocumentBounds, scale: float | None = None
) -> Tensor:
    """See plain.document_attention."""
    varlen = _varlen()
    if varlen is None or q_BSHK.dtype not in (torch.bfloat16, torch.float16):
        tensors = ScoreTensors(document_BS=documents.numbers(*q_BSHK.shape[:2]))
        return scored_attention(q_BSHK, k_BSGK, v_BSGK, ScoreShape(scale=scale or 0.0), tensors)
    q_NHK, k_NGK, v_NGK = (x.flatten(0, 1) for x in (q_BSHK, k_BSGK, v_BSGK))
    bounds, longest = documents.bounds, documents.longest
    options = _varlen_options(scale, grouped=q_NHK.shape[1] != k_NGK.shape[1])
    if options.pop("repeat", False):
        k_NGK, v_NGK = (x.repeat_interleave(q_NHK.shape[1] // x.shape[1], dim=1) for x in (k_NGK, v_NGK))
    return varlen(q_NHK, k_NGK, v_NGK, bounds, bounds, longest, longest, **options).view(q_BSHK.shape)


def scored_attention(
    q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, scores: ScoreShape, tensors: ScoreTensors
) -> Tensor:
    """See plain.scored_attention."""
    if tensors.keep_BHST is not None:
        return plain.scored_attention(q_BSHK, k_BSGK, v_BSGK, scores, tensors)
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    batch, length, heads, width = q_BSHK.shape
    document_BS, slope_H = tensors.document_BS, tensors.slope_H
    mask = create_block_mask(
        _visible(scores.window, document_BS),
        batch if document_BS is not None else None,
        None,
        length,
        length,
        device=str(q_BSHK.device),
    )
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGK))
    y_BHSK, beside = _flex()(
        q,
        k,
        v,
        score_mod=_changed(scores.softcap, slope_H),
        block_mask=mask,
        scale=scores.factor(width),
        enable_gqa=heads != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if tensors.sink_H is not None:
        # A softmax with one more logit is the softmax without it, times the share of what is not the sink.
        share = (beside.lse - tensors.sink_H.view(1, -1, 1)).sigmoid()
        y_BHSK = (y_BHSK * share.unsqueeze(-1)).to(q.dtype)
    return y_BHSK.transpose(1, 2)


def _visible(window: int, document_BS: Tensor | None) -> Callable[..., Tensor]:
    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = i >= j
        if window:
            seen = seen & (i - j < window)
        return seen if document_BS is None else seen & (document_BS[b, i] == document_BS[b, j])

    return mask


def _changed(softcap: float, slope_H: Tensor | None) -> Callable[..., Tensor] | None:
    if not softcap and slope_H is None:
        return None

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = softcap * (score / softcap).tanh() if softcap else score
        return score if slope_H is None else score - slope_H[h] * (i - j)

    return change


@functools.cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Compiled for each length by itself: with symbolic lengths a score function that captures tensors fails to compile
    # (PyTorch 2.11). A model has one set of options, and few lengths.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FLEX_VARIANTS)
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _varlen() -> Callable[..., Any] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # PyTorch below 2.10
        return None
    return varlen_attn


def _varlen_options(scale: float | None, *, grouped: bool) -> dict[str, Any]:
    """The call's keywords, whose names differ between versions of PyTorch."""
    known = inspect.signature(_varlen() or _flex).parameters
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
    if scale is not None:
        options["scale"] = scale
    if grouped:
        options["enable_gqa" if "enable_gqa" in known else "repeat"] = True
    return options
