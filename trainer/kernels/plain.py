"""The small operations in plain PyTorch: their definition, and the twin of every faster implementation.

First those of the layers. Each is a pure function of tensors, except those whose name ends in `_`. Arithmetic is in at
least fp32; results have the dtype of the activations, gradients of weights stay in the wider dtype. Backward functions
are written explicitly, because the layers have their own backward passes.

Then the parameter updates, whose arguments are flat tensors, written in place, except the matrices of Muon. Nothing
waits for the device: a step that must not be applied is computed and discarded. updates.py says which parameters a rule
applies to.

Shapes: N tokens, D hidden, F feed-forward, I inputs, O outputs, V local vocabulary rows, B batch, S sequence, E heads
of any kind, H query heads, G key-value heads, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.kernels.philox import keep
from trainer.kernels.scores import ScoreShape


def rms_norm(
    x_ND: Tensor, branch_ND: Tensor | None, weight_D: Tensor, bias_D: None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(x + branch, its norm, reciprocal of the root mean square [N, 1])."""
    sum_ND = x_ND if branch_ND is None else x_ND + branch_ND
    wide_ND = _widen(sum_ND)
    scale_N1 = (wide_ND.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return sum_ND, (wide_ND * scale_N1 * _widen(weight_D)).to(x_ND.dtype), scale_N1


def rms_norm_backward(
    dsum_ND: Tensor | None, dy_ND: Tensor, sum_ND: Tensor, weight_D: Tensor, scale_N1: Tensor
) -> tuple[Tensor, Tensor, None]:
    """(gradient of the sum, that of the weight, None)."""
    wide_dy_ND, unit_ND = _widen(dy_ND), _widen(sum_ND) * scale_N1
    g_ND = wide_dy_ND * _widen(weight_D)
    dx_ND = scale_N1 * (g_ND - unit_ND * (g_ND * unit_ND).mean(-1, keepdim=True))
    if dsum_ND is not None:
        dx_ND = dx_ND + _widen(dsum_ND)
    return dx_ND.to(dy_ND.dtype), (wide_dy_ND * unit_ND).sum(0), None


def layer_norm(
    x_ND: Tensor, branch_ND: Tensor | None, weight_D: Tensor, bias_D: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x + branch, its norm, mean [N, 1], reciprocal of the deviation [N, 1])."""
    sum_ND = x_ND if branch_ND is None else x_ND + branch_ND
    wide_ND = _widen(sum_ND)
    mean_N1 = wide_ND.mean(-1, keepdim=True)
    centred_ND = wide_ND - mean_N1
    scale_N1 = (centred_ND.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    y_ND = centred_ND * scale_N1 * _widen(weight_D) + _widen(bias_D)
    return sum_ND, y_ND.to(x_ND.dtype), mean_N1, scale_N1


def layer_norm_backward(
    dsum_ND: Tensor | None, dy_ND: Tensor, sum_ND: Tensor, weight_D: Tensor, mean_N1: Tensor, scale_N1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the sum, that of the weight, that of the bias)."""
    wide_dy_ND, unit_ND = _widen(dy_ND), (_widen(sum_ND) - mean_N1) * scale_N1
    g_ND = wide_dy_ND * _widen(weight_D)
    along_ND = unit_ND * (g_ND * unit_ND).mean(-1, keepdim=True)
    dx_ND = scale_N1 * (g_ND - g_ND.mean(-1, keepdim=True) - along_ND)
    if dsum_ND is not None:
        dx_ND = dx_ND + _widen(dsum_ND)
    return dx_ND.to(dy_ND.dtype), (wide_dy_ND * unit_ND).sum(0), wide_dy_ND.sum(0)


def swiglu(both_NF: Tensor) -> Tensor:
    """silu(gate) * up of [N, 2F], gate first: [N, F]."""
    gate_NF, up_NF = both_NF.chunk(2, dim=-1)
    return (F.silu(_widen(gate_NF)) * _widen(up_NF)).to(both_NF.dtype)


def swiglu_backward_(dgate_NF: Tensor, dup_NF: Tensor, dy_NF: Tensor, gate_NF: Tensor, up_NF: Tensor) -> None:
    """Write the gradients of gate and up; each may be half of one tensor, so that they need not be joined."""
    gate, up, dy = _widen(gate_NF), _widen(up_NF), _widen(dy_NF)
    sigmoid = gate.sigmoid()
    dgate_NF.copy_(dy * up * sigmoid * (1 + gate * (1 - sigmoid)))
    dup_NF.copy_(dy * gate * sigmoid)


def gated(both_NF: Tensor, how: tuple[str, float, float]) -> Tensor:
    """f(gate) * (up + offset) of [N, 2F], gate first: [N, F].

    Args:
        how: name of the activation; clamp, the largest gate and the largest absolute value of up (0: none); offset.
    """
    gate_NF, up_NF = (_widen(x) for x in both_NF.chunk(2, dim=-1))
    activation, clamp, offset = how
    if clamp:
        gate_NF, up_NF = gate_NF.clamp(max=clamp), up_NF.clamp(-clamp, clamp)
    return (_value_and_slope(activation, gate_NF)[0] * (up_NF + offset)).to(both_NF.dtype)


def gated_backward_(
    dgate_NF: Tensor, dup_NF: Tensor, dy_NF: Tensor, gate_NF: Tensor, up_NF: Tensor, how: tuple[str, float, float]
) -> None:
    """Write the gradients of gate and up; each may be half of one tensor."""
    gate, up, dy = _widen(gate_NF), _widen(up_NF), _widen(dy_NF)
    activation, clamp, offset = how
    low, high = (-clamp, clamp) if clamp else (-math.inf, math.inf)
    value, slope = _value_and_slope(activation, gate.clamp(max=high))
    dgate_NF.copy_(dy * (up.clamp(low, high) + offset) * slope * (gate <= high))
    dup_NF.copy_(dy * value * ((up >= low) & (up <= high)))


def _value_and_slope(activation: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """f(x) and f'(x) of the gate's activation."""
    if activation == "swiglu":
        sigmoid = x.sigmoid()
        return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))
    if activation == "geglu":
        normal = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return x * normal, normal + x * (-0.5 * x * x).exp() / math.sqrt(2 * math.pi)
    if activation == "quick_geglu":
        sigmoid = (1.702 * x).sigmoid()
        return x * sigmoid, sigmoid * (1 + 1.702 * x * (1 - sigmoid))
    root = math.sqrt(2 / math.pi)
    tanh = (root * (x + 0.044715 * x**3)).tanh()
    inner = root * (1 + 3 * 0.044715 * x * x)
    return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * inner


def split_heads(
    qkv_BSEK: Tensor, cosine_SR: Tensor, sine_SR: Tensor, heads: int, groups: int, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of E = H + 2G heads, q and k rotated by the angle of their position; contiguous."""
    q_BSHK, k_BSGK, v_BSGK = qkv_BSEK.split((heads, groups, groups), dim=2)
    turned = (rotate(x, cosine_SR, sine_SR, interleaved) for x in (q_BSHK, k_BSGK))
    return *turned, v_BSGK.contiguous()


def join_heads_(
    out: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    rotation_SR: tuple[Tensor, Tensor] | None,
    interleaved: bool = False,
) -> None:
    """Write the gradients of q, k and v, the first two rotated back, into three parts of one tensor."""
    dq, dk, dv = gradients
    if rotation_SR is not None:
        cosine_SR, sine_SR = rotation_SR
        dq, dk = (rotate(x, cosine_SR, -sine_SR, interleaved) for x in (dq, dk))
    for part, gradient in zip(out, (dq, dk, dv), strict=True):
        part.copy_(gradient)


def rotate(x_BSEK: Tensor, cosine_SR: Tensor, sine_SR: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate pairs of a head's first 2R features; pairs are (i, i + R), or (2i, 2i + 1).

    Args:
        cosine_SR, sine_SR: of each position and pair, [S, R] or [B, S, R].
    """
    cosine, sine = cosine_SR.unsqueeze(-2), sine_SR.unsqueeze(-2)
    wide, turning = x_BSEK.to(cosine_SR.dtype), 2 * cosine_SR.shape[-1]
    part, rest = wide[..., :turning], wide[..., turning:]
    if interleaved:
        first, second = part[..., ::2], part[..., 1::2]
        both = torch.stack((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
        return torch.cat((both.flatten(-2), rest), dim=-1).to(x_BSEK.dtype)
    first, second = part.chunk(2, dim=-1)
    turned = [first * cosine - second * sine, second * cosine + first * sine]
    return torch.cat((*turned, rest) if rest.shape[-1] else turned, dim=-1).to(x_BSEK.dtype)


def attention(
    q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, scale: float | None = None, ends: tuple[int, ...] | None = None
) -> Tensor:
    """Causal attention of whole sequences: [B, S, H, K].

    Args:
        scale: of scores, default 1 / sqrt(K).
        ends: under context parallelism the queries are chunks of equal length, one ending at each of these positions in
            the row; None: as many queries as keys.
    """
    if ends is not None:
        parts = [_attend(q, k_BTGK[:, :end], v_BTGK[:, :end], scale) for q, end in query_chunks(q_BSHK, ends)]
        return torch.cat(parts, dim=1)
    assert q_BSHK.shape[1] == k_BTGK.shape[1], f"{q_BSHK.shape[1]} queries, {k_BTGK.shape[1]} keys"
    return _attend(q_BSHK, k_BTGK, v_BTGK, scale)


def query_chunks(q_BSHK: Tensor, ends: tuple[int, ...]) -> Iterator[tuple[Tensor, int]]:
    """(queries of a chunk, where it ends in the row)."""
    return zip(q_BSHK.chunk(len(ends), dim=1), ends, strict=True)


def chunk_columns(q_BSHK: Tensor, ends: tuple[int, ...]) -> Tensor:
    """int64[S]: the position of each query in its row."""
    chunk = q_BSHK.shape[1] // len(ends)
    return torch.cat([torch.arange(end - chunk, end, device=q_BSHK.device) for end in ends])


def _attend(q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, scale: float | None) -> Tensor:
    """Causal attention of the last S of T tokens."""
    q_BHSK, k_BGTK, v_BGTK = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
    # SDPA's is_causal is top-left aligned: correct only for as many keys as queries.
    same, grouped = q_BHSK.shape[2] == k_BGTK.shape[2], q_BHSK.shape[1] != k_BGTK.shape[1]
    mask = None if same else _lower_right(q_BHSK.shape[2], k_BGTK.shape[2])
    y_BHSK = F.scaled_dot_product_attention(
        q_BHSK, k_BGTK, v_BGTK, attn_mask=mask, is_causal=same, scale=scale, enable_gqa=grouped
    )
    return y_BHSK.transpose(1, 2)


def _lower_right(num_queries: int, num_keys: int) -> Tensor:
    """A causal mask that is aligned at the last query and the last key."""
    # The module loads torch.compile's front end: over 3 s of CPU time, which training does not need.
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(num_queries, num_keys)


class DocumentBounds(Protocol):
    """Where documents begin and end in flat tokens: `bounds` int32 from 0 to N, and the tokens of the longest."""

    bounds: Tensor
    longest: int

    def numbers(self, batch: int, length: int) -> Tensor:
        """The document of each token: int64[B, S]."""


class ScoreTensors(NamedTuple):
    """Tensors for the heads and tokens of a call; None: option not used.

    Args:
        sink_H: the additional logit of each head's softmax. slope_H: of ALiBi.
        document_BS: the document of each token of the row. keep_BHST: bool, the weights that dropout keeps.
        column_S: int64, the position of each query in its row; None: queries begin where keys do.
        length_B: int32, real keys of each row, at least 1; the rest is padding, which no query sees.
        bias_HST: added to scores; differentiable. mask_BHST: what `bias_mask` made of it.
        far_HD: added to the scores of keys so many tokens before the query; the last one for all keys before those.
    """

    sink_H: Tensor | None = None
    slope_H: Tensor | None = None
    document_BS: Tensor | None = None
    keep_BHST: Tensor | None = None
    column_S: Tensor | None = None
    length_B: Tensor | None = None
    bias_HST: Tensor | None = None
    far_HD: Tensor | None = None
    mask_BHST: Tensor | None = None


def document_attention(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    documents: DocumentBounds,
    scale: float | None = None,
    ends: tuple[int, ...] | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention inside each document, causal or not: [B, S, H, K]; scale and ends as in `attention`."""
    column_S = None if ends is None else chunk_columns(q_BSHK, ends)
    tensors = ScoreTensors(document_BS=documents.numbers(*k_BTGK.shape[:2]), column_S=column_S)
    return scored_attention(q_BSHK, k_BTGK, v_BTGK, ScoreShape(scale=scale or 0.0, causal=causal), tensors)


def padded_attention(
    q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, length_B: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Attention to all real tokens of a row, before and after: [B, S, H, K]. Nobody reads that of padding.

    Args:
        length_B: int32, real keys of each row, at least 1; None: all are.
    """
    q_BHSK, k_BGTK, v_BGTK = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
    real = None
    if length_B is not None:
        real = (torch.arange(k_BTGK.shape[1], device=q_BSHK.device) < length_B.unsqueeze(1))[:, None, None]
    grouped = q_BHSK.shape[1] != k_BGTK.shape[1]
    y_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BGTK, v_BGTK, attn_mask=real, scale=scale, enable_gqa=grouped)
    return y_BHSK.transpose(1, 2)


def scored_attention(
    q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, scores: ScoreShape, tensors: ScoreTensors
) -> Tensor:
    """Attention with every option of `ScoreShape`, in at least fp32: [B, S, H, K]. Holds all scores at once.

    Differentiable by autograd, in q, k, v, sink_H and bias_HST.
    """
    heads, (length, groups) = q_BSHK.shape[2], k_BTGK.shape[1:3]
    q, k, v = (_widen(x) for x in (q_BSHK.unflatten(2, (groups, heads // groups)), k_BTGK, v_BTGK))
    score = torch.einsum("bsgrk,btgk->bgrst", q, k).flatten(1, 2) * scores.factor(q_BSHK.shape[-1])
    if scores.softcap:
        score = scores.softcap * (score / scores.softcap).tanh()
    if tensors.bias_HST is not None:
        score = score + _widen(tensors.bias_HST)
    token = torch.arange(length, device=q.device)
    query = torch.arange(q.shape[1], device=q.device) if tensors.column_S is None else tensors.column_S
    distance_ST = query.unsqueeze(1) - token
    if tensors.slope_H is not None:
        score = score - tensors.slope_H.view(-1, 1, 1) * distance_ST
    if tensors.far_HD is not None:
        score = score + tensors.far_HD[:, distance_ST.clamp(0, tensors.far_HD.shape[1] - 1)]
    hidden = (distance_ST < 0) & scores.causal
    if tensors.length_B is not None:
        hidden = hidden | (token >= tensors.length_B.unsqueeze(1))[:, None, None]
    if scores.window:
        hidden = hidden | (distance_ST >= scores.window)
    if (document_BS := tensors.document_BS) is not None:
        hidden = hidden | (document_BS[:, query].unsqueeze(2) != document_BS.unsqueeze(1)).unsqueeze(1)
    score = score.masked_fill(hidden, -math.inf)
    if tensors.sink_H is not None:
        sink = _widen(tensors.sink_H).view(1, -1, 1, 1).expand(*score.shape[:3], 1)
        score = torch.cat((score, sink), dim=-1)
    weight = score.softmax(dim=-1)[..., :length]
    if tensors.keep_BHST is not None:
        weight = torch.where(tensors.keep_BHST, weight / (1 - scores.dropout), 0.0)
    y = torch.einsum("bgrst,btgk->bsgrk", weight.unflatten(1, (groups, heads // groups)), v)
    return y.flatten(2, 3).to(q_BSHK.dtype)


def bias_mask(
    bias_HST: Tensor, scores: ScoreShape, length_B: Tensor | None, dtype: torch.dtype, width: int = 0
) -> Tensor | None:
    """A constant for all layers with these biases and rows, for a kernel that reads one mask; None: it reads none.

    Args:
        dtype: of queries. width: of their heads.
    """
    return None


def paged_attention(
    q_BHK: Tensor,
    k_BGK: Tensor,
    v_BGK: Tensor,
    key_PTGK: Tensor,
    value_PTGK: Tensor,
    table_BP: Tensor,
    length_B: Tensor,
    scores: ScoreShape,
    tensors: ScoreTensors,
) -> Tensor:
    """Write the last token of each row into its page, and let it attend to the row, in at least fp32: [B, H, K].

    Args:
        k_BGK, v_BGK: the last token's key and value.
        key_PTGK, value_PTGK: a pool of pages of T tokens.
        table_BP: int32, the pages of each row, in order. length_B: int32, tokens of each row.
        scores: all but dropout apply.
    """
    (page, groups), heads, last_B = key_PTGK.shape[1:3], q_BHK.shape[1], length_B.long() - 1
    page_B = table_BP.gather(1, (last_B // page).unsqueeze(1)).squeeze(1).long()
    for pool, new_BGK in ((key_PTGK, k_BGK), (value_PTGK, v_BGK)):
        pool.flatten(0, 1).index_copy_(0, page_B * page + last_B % page, new_BGK)
    k_BTGK, v_BTGK = (_widen(pool[table_BP].flatten(1, 2)) for pool in (key_PTGK, value_PTGK))
    score_BGRT = torch.einsum("bgrk,btgk->bgrt", _widen(q_BHK).unflatten(1, (groups, heads // groups)), k_BTGK)
    score_BHT = score_BGRT.flatten(1, 2) * scores.factor(q_BHK.shape[-1])
    if scores.softcap:
        score_BHT = scores.softcap * (score_BHT / scores.softcap).tanh()
    distance_BT = last_B.unsqueeze(1) - torch.arange(k_BTGK.shape[1], device=q_BHK.device)
    if tensors.slope_H is not None:
        score_BHT = score_BHT - tensors.slope_H.view(-1, 1) * distance_BT.unsqueeze(1)
    if tensors.far_HD is not None:
        far_HBT = tensors.far_HD[:, distance_BT.clamp(0, tensors.far_HD.shape[1] - 1)]
        score_BHT = score_BHT + far_HBT.transpose(0, 1)
    hidden_BT = distance_BT < 0
    if scores.window:
        hidden_BT = hidden_BT | (distance_BT >= scores.window)
    score_BHT = score_BHT.masked_fill(hidden_BT.unsqueeze(1), -math.inf)
    if tensors.sink_H is not None:
        sink_BH1 = _widen(tensors.sink_H).view(1, -1, 1).expand(len(q_BHK), -1, 1)
        score_BHT = torch.cat((score_BHT, sink_BH1), dim=-1)
    weight_BHT = score_BHT.softmax(dim=-1)[..., : k_BTGK.shape[1]]
    y_BGRK = torch.einsum("bgrt,btgk->bgrk", weight_BHT.unflatten(1, (groups, heads // groups)), v_BTGK)
    return y_BGRK.flatten(1, 2).to(q_BHK.dtype)


def ragged_attention(
    q_NHK: Tensor,
    k_MGK: Tensor,
    v_MGK: Tensor,
    counts: tuple[int, ...],
    lengths: tuple[int, ...],
    scores: ScoreShape,
    tensors: ScoreTensors,
) -> Tensor:
    """Causal attention of rows of several lengths, one after the other: [N, H, K].

    Args:
        q_NHK: the last tokens of each row, `counts` of them. k_MGK, v_MGK: of all its tokens, `lengths` of them.
        scores: all but dropout apply.
    """
    rows = zip(q_NHK.split(counts), k_MGK.split(lengths), v_MGK.split(lengths), strict=True)
    parts = [_attend_row(q[None], k[None], v[None], scores, tensors)[0] for q, k, v in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_row(q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, scores: ScoreShape, tensors: ScoreTensors) -> Tensor:
    """Causal attention of the last S of T tokens with the options of scores."""
    new, length = q_BSHK.shape[1], k_BTGK.shape[1]
    column_S = torch.arange(length - new, length, device=q_BSHK.device)
    if scores.softcap or scores.alibi or scores.relative or scores.sinks != "none":
        return scored_attention(q_BSHK, k_BTGK, v_BTGK, scores, tensors._replace(column_S=column_S))
    visible_ST = None
    if scores.window or new < length:
        distance_ST = column_S.unsqueeze(1) - torch.arange(length, device=q_BSHK.device)
        visible_ST = (distance_ST >= 0) & (distance_ST < (scores.window or length))
    q_BHSK, k_BGTK, v_BGTK = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
    y_BHSK = F.scaled_dot_product_attention(
        q_BHSK,
        k_BGTK,
        v_BGTK,
        attn_mask=visible_ST,
        is_causal=visible_ST is None,
        scale=scores.scale or None,
        enable_gqa=q_BSHK.shape[2] != k_BTGK.shape[2],
    )
    return y_BHSK.transpose(1, 2)


def add_product(target: Tensor, dy_NO: Tensor, *, x_NI: Tensor, overwrite: bool = False) -> None:
    """dy^T x, [O, I], added to `target`, or overwriting it.

    On CUDA a single matrix product accumulates in the wider dtype; elsewhere the factors are converted first.
    """
    left, right = dy_NO.t(), x_NI
    wider = target.dtype != dy_NO.dtype
    if wider and not target.is_cuda:
        left, right, wider = left.to(target.dtype), right.to(target.dtype), False
    options: dict[str, Any] = {"out_dtype": target.dtype} if wider else {}
    if overwrite:
        torch.mm(left, right, out=target, **options)
    else:
        torch.addmm(target, left, right, out=target, **options)


def weigh(y_MF: Tensor, weight_M: Tensor) -> Tensor:
    """Each row times its weight, in y's dtype."""
    return (y_MF * weight_M.unsqueeze(1)).to(y_MF.dtype)


def weigh_backward(dz_MF: Tensor, y_MF: Tensor, weight_M: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of rows and of their weights."""
    dweight_M = (dz_MF.to(weight_M.dtype) * y_MF).sum(1)
    return (dz_MF * weight_M.unsqueeze(1)).to(y_MF.dtype), dweight_M


def weigh_swiglu(both_MF: Tensor, weight_M: Tensor, end_E: Tensor) -> Tensor:
    """SwiGLU of [M, 2F] of each row times its weight: [M, F]. Rows behind the last group's may have any values."""
    return weigh(swiglu(both_MF), weight_M)


def weigh_swiglu_backward(dz_MF: Tensor, both_MF: Tensor, weight_M: Tensor, end_E: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of [M, 2F] and of weights."""
    dboth_MF = torch.empty_like(both_MF)
    (dgate_MF, dup_MF), (gate_MF, up_MF) = dboth_MF.chunk(2, dim=-1), both_MF.chunk(2, dim=-1)
    dy_MF, dweight_M = weigh_backward(dz_MF, swiglu(both_MF), weight_M)
    swiglu_backward_(dgate_MF, dup_MF, dy_MF, gate_MF, up_MF)
    return dboth_MF, dweight_M


def take_rows(x_AD: Tensor, token_M: Tensor, end_E: Tensor) -> Tensor:
    """The row of each token: [M, D]. Rows behind the last group's may have any values."""
    return x_AD[token_M]


def sum_slots(y_MD: Tensor, row_AK: Tensor, computed_AK: Tensor | None) -> Tensor:
    """The sum of each token's rows, in the order of its slots; rows that were not computed count as 0: [A, D]."""
    y_AKD = y_MD[row_AK]
    if computed_AK is not None:
        y_AKD = torch.where(computed_AK.unsqueeze(-1), y_AKD, 0.0)
    return y_AKD.sum(1)


def grouped_product(x_MI: Tensor, weight_EOI: Tensor, end_E: Tensor) -> Tensor:
    """x W_e^T of each row with the weight of its group: [M, O]; rows of no group are 0.

    Args:
        end_E: int32, where the rows of each group end; the first group begins at row 0.
    """
    y_MO = x_MI.new_zeros(len(x_MI), weight_EOI.shape[1])
    for expert, start, stop in _groups(end_E):
        torch.mm(x_MI[start:stop], weight_EOI[expert].t(), out=y_MO[start:stop])
    return y_MO


def add_grouped_product(
    target_EOI: Tensor, dy_MO: Tensor, *, x_MI: Tensor, end_E: Tensor, overwrite: bool = False
) -> None:
    """dy^T x of the rows of each group, added to its part of `target`, or overwriting it."""
    if overwrite:
        target_EOI.zero_()
    for expert, start, stop in _groups(end_E):
        add_product(target_EOI[expert], dy_MO[start:stop], x_NI=x_MI[start:stop])


def _groups(end_E: Tensor) -> Iterator[tuple[int, int, int]]:
    """(group, first row, row behind the last) of groups with rows; in a rehearsal there are none."""
    start = 0
    for expert, stop in enumerate([] if end_E.is_meta else end_E.tolist()):
        if stop > start:
            yield expert, start, stop
        start = stop


def dropout(x_NF: Tensor, sample_N: Tensor, position_N: Tensor, key_2: Tensor, probability: float) -> Tensor:
    """x / (1 - probability) where dropout keeps it, otherwise 0; also its own backward function.

    The draws are those of `philox.keep`: from the token's sample and position, the feature and the key.
    """
    keep_mask = keep(sample_N, position_N, None, features=x_NF.shape[1], key_2=key_2, probability=probability)
    return torch.where(keep_mask, _widen(x_NF) / (1 - probability), 0.0).to(x_NF.dtype)


def logit_statistics(logits_NV: Tensor, column_N: Tensor, real: int) -> tuple[Tensor, Tensor, Tensor]:
    """(largest logit, sum of exp(logit - largest), the label's logit) of each token over this rank's columns.

    Args:
        column_N: the label's column on this rank; -1 if another rank holds it: the logit then counts as 0.
        real: columns that are not padding; a rank with only padding has -inf, 0 and 0.
    """
    x_NV = _widen(logits_NV[:, :real])
    if not real:
        return x_NV.new_full((len(x_NV),), -torch.inf), x_NV.new_zeros(len(x_NV)), x_NV.new_zeros(len(x_NV))
    top_N = x_NV.amax(dim=1)
    total_N = (x_NV - top_N.unsqueeze(1)).exp().sum(dim=1)
    label_N = x_NV.gather(1, column_N.clamp(min=0).unsqueeze(1)).squeeze(1)
    return top_N, total_N, torch.where(column_N >= 0, label_N, 0.0)


def logits_to_gradient_(logits_NV: Tensor, log_total_N: Tensor, column_N: Tensor, weight_N: Tensor, real: int) -> None:
    """Overwrite logits with the loss's gradient: (softmax - one hot of the label) * weight, 0 in padding."""
    x_NV = _widen(logits_NV)
    ids_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    probability_NV = (x_NV - log_total_N.unsqueeze(1)).exp() - (ids_V == column_N.unsqueeze(1)).to(x_NV.dtype)
    gradient_NV = probability_NV * weight_N.to(x_NV.dtype).unsqueeze(1)
    logits_NV.copy_(torch.where(ids_V < real, gradient_NV, 0.0))


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


MUON_EPSILON = 1e-7  # smallest norm by which a matrix is divided before Newton-Schulz


T = TypeVar("T")


class AdamState(NamedTuple):
    """Flat tensors: main weight, first and second moment, and the parameter that becomes the rounded weight.

    Without a parameter the main weight is the parameter.
    """

    weight: Tensor
    first: Tensor
    second: Tensor
    parameter: Tensor | None


class AdamStep(NamedTuple, Generic[T]):
    """The numbers of a step, which are passed as one tensor, [5] in the main dtype.

    Args:
        factor: by which gradients are multiplied. rate: of learning. correction1: 1 - beta1^steps. correction2: 1 -
            beta2^steps.
    """

    factor: T
    rate: T
    correction1: T
    correction2: T
    steps: T


class AdamConstants(NamedTuple):
    """What is the same in every step; the weight decay is a scalar tensor where it changes from step to step."""

    beta1: float
    beta2: float
    epsilon: float
    decay: float | Tensor


def adamw_(state: AdamState, gradient: Tensor, numbers: Tensor, applied: Tensor, constants: AdamConstants) -> None:
    """One AdamW update (Loshchilov and Hutter 2019, algorithm 2) of flat tensors.

    Args:
        gradient: undivided.
        numbers: the fields of an `AdamStep`.
        applied: bool scalar; nothing changes where it is False.
    """
    weight, first, second, parameter = state
    step: AdamStep[Tensor] = AdamStep(*numbers.unbind(0))
    beta1, beta2, epsilon, decay = constants
    scaled = gradient.to(weight.dtype) * step.factor
    new_first = beta1 * first + (1 - beta1) * scaled
    new_second = beta2 * second + (1 - beta2) * scaled * scaled
    direction = (new_first / step.correction1) / ((new_second / step.correction2).sqrt() + epsilon)
    new_weight = torch.where(applied, weight - step.rate * (decay * weight + direction), weight)
    first.copy_(torch.where(applied, new_first, first))
    second.copy_(torch.where(applied, new_second, second))
    weight.copy_(new_weight)
    if parameter is not None:
        parameter.copy_(new_weight)


class SgdState(NamedTuple):
    """Flat tensors: main weight, momentum, and the parameter that becomes the rounded weight; see `AdamState`."""

    weight: Tensor
    momentum: Tensor
    parameter: Tensor | None


class SgdStep(NamedTuple, Generic[T]):
    """The numbers of a step: what gradients are multiplied by, and the learning rate."""

    factor: T
    rate: T


class SgdConstants(NamedTuple):
    """See `AdamConstants`."""

    momentum: float
    decay: float | Tensor


def sgd_(state: SgdState, gradient: Tensor, numbers: Tensor, applied: Tensor, constants: SgdConstants) -> None:
    """One update by gradient descent with momentum (Sutskever et al. 2013, in the form of torch and Megatron).

    The weight decay is not decoupled: it is added to the gradient.

    Args:
        gradient: undivided.
        numbers: the fields of an `SgdStep`, [2] in the main dtype.
        applied: bool scalar; nothing changes where it is False.
    """
    weight, first, parameter = state
    step: SgdStep[Tensor] = SgdStep(*numbers.unbind(0))
    momentum, decay = constants
    new_first = momentum * first + (gradient.to(weight.dtype) * step.factor + decay * weight)
    new_weight = torch.where(applied, weight - step.rate * new_first, weight)
    first.copy_(torch.where(applied, new_first, first))
    weight.copy_(new_weight)
    if parameter is not None:
        parameter.copy_(new_weight)


def muon_momentum_(
    first: Tensor, gradient: Tensor, factor: Tensor, applied: Tensor, constants: tuple[float, bool]
) -> Tensor:
    """Add a gradient to its running mean, and return the direction to be orthogonalized; flat tensors.

    Args:
        first: the mean of gradients. gradient: undivided. factor: scalar by which the gradient is multiplied.
        applied: bool scalar; if False, the mean does not change.
        constants: decay of the mean; whether the direction looks ahead (Nesterov's) or is the mean.
    """
    momentum, nesterov = constants
    scaled = gradient.to(first.dtype) * factor.to(first.dtype)
    mean = momentum * first + (1 - momentum) * scaled
    first.copy_(torch.where(applied, mean, first))
    return momentum * mean + (1 - momentum) * scaled if nesterov else mean.clone()


def muon_apply_(
    state: tuple[Tensor, Tensor | None], update: Tensor, rate: Tensor, applied: Tensor, decay: float | Tensor
) -> None:
    """Move flat (main weight, rounded parameter or None) by rate times (decay * weight + update) where `applied`."""
    weight, parameter = state
    moved = weight - rate.to(weight.dtype) * (decay * weight + update)
    weight.copy_(torch.where(applied, moved, weight))
    if parameter is not None:
        parameter.copy_(weight)


def orthogonalize(matrix: Tensor, dtype: torch.dtype, coefficients: Sequence[tuple[float, float, float]]) -> Tensor:
    """A matrix with the singular vectors of this one and singular values near 1: [rows, columns].

    Newton-Schulz iterations x <- a x + (b x x^T + c (x x^T)^2) x, with polynomials whose slope at 0 is steep (Jordan et
    al. 2024), and products in `dtype`. A zero matrix stays zero.

    Args:
        coefficients: (a, b, c) of each iteration.
    """
    wide = len(matrix) <= matrix.shape[1]
    norm = torch.linalg.matrix_norm(matrix.to(torch.promote_types(matrix.dtype, torch.float32))).clamp(min=MUON_EPSILON)
    x = (matrix / norm).to(dtype)
    x = x if wide else x.t()
    for a, b, c in coefficients:
        square = x @ x.t()
        x = a * x + (b * square + c * square @ square) @ x
    return (x if wide else x.t()).to(matrix.dtype)
