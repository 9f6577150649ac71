"""Attention on a GPU in cases that PyTorch's fused kernels for whole causal rows do not cover.

Documents inside rows, padded rows, and prompts of several lengths, use cuDNN (cudnn_sequences.py) or variable-length
flash attention if the dtype allows; biases of relative positions use kernels of ours (biased_attention.py), or
PyTorch's memory-efficient attention, the only one whose masks have gradients; everything else uses FlexAttention,
compiled once for each set of options (Dong et al. 2024). Dropout of weights is left to the plain implementation, which
holds all scores. Each function has the signature of its plain twin.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.kernels import biased_attention, cudnn_sequences, plain
from trainer.kernels.float8 import MULTIPLE, Float8Rows, float8_rows, float8_rows_matrix
from trainer.kernels.plain import DocumentBounds, ScoreTensors
from trainer.kernels.scores import ScoreShape
from trainer.kernels.self_test import refusals

HALF = (torch.bfloat16, torch.float16)
MANY_QUERIES = 2048  # of prompts: for fewer, the host may take longer to start cuDNN than its kernel saves
MASK_MULTIPLE = 16  # of the keys of a mask in memory, which PyTorch would otherwise copy in each call
GRADIENT_BLOCK = (128, 256)  # outputs and inputs of an expert's weight of a program; the fastest of six on an H100
GROUPED_ALIGNMENT = 8  # elements of 16 bits: torch's grouped products need rows of a multiple of 16 bytes
FLEX_VARIANTS = 64  # lengths and options that are compiled before PyTorch falls back to full matrices of scores


def document_attention(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    documents: DocumentBounds,
    scale: float | None = None,
    ends: tuple[int, ...] | None = None,
    causal: bool = True,
) -> Tensor:
    """See plain.document_attention."""
    length = k_BTGK.shape[1]
    if ends is None and cudnn_sequences.takes(q_BSHK, k_BTGK, v_BTGK):
        places = cudnn_sequences.Places(documents.bounds, documents.longest)
        heads = tuple(x.flatten(0, 1) for x in (q_BSHK, k_BTGK, v_BTGK))
        y_NHK = cudnn_sequences.attention(heads, (places, places), causal=causal, scale=scale)
        if y_NHK is not None:
            return y_NHK.view(q_BSHK.shape)
    if q_BSHK.dtype not in HALF:
        columns = None if ends is None else plain.chunk_columns(q_BSHK, ends)
        tensors = ScoreTensors(document_BS=documents.numbers(*k_BTGK.shape[:2]), column_S=columns)
        return scored_attention(q_BSHK, k_BTGK, v_BTGK, ScoreShape(scale=scale or 0.0, causal=causal), tensors)
    options = _varlen_options(scale, grouped=q_BSHK.shape[2] != k_BTGK.shape[2], causal=causal)
    if options.pop("repeat", False):
        k_BTGK, v_BTGK = (x.repeat_interleave(q_BSHK.shape[2] // x.shape[2], dim=2) for x in (k_BTGK, v_BTGK))
    parts = []
    for q, end in plain.query_chunks(q_BSHK, ends or (length,)):
        bounds = chunk_bounds(documents.bounds, length, end=end, chunk=q.shape[1])
        flat = (x.flatten(0, 1) for x in (q, k_BTGK[:, :end], v_BTGK[:, :end]))
        parts.append(_varlen()(*flat, *bounds, documents.longest, documents.longest, **options).view(q.shape))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def padded_attention(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGK: Tensor,
    length_B: Tensor | None = None,
    scale: float | None = None,
    *,
    own_rows: bool = True,
) -> Tensor:
    """See plain.padded_attention.

    Args:
        own_rows: queries and keys are of the same tokens; a row's real tokens and its padding are then two sequences,
            apart from each other. Otherwise all queries, as those of a decoder, see the real keys.
    """
    shape, keys = q_BSHK.shape, k_BTGK.shape[1]
    if length_B is None or q_BSHK.dtype not in HALF:
        return plain.padded_attention(q_BSHK, k_BTGK, v_BTGK, length_B, scale)
    if cudnn_sequences.takes(q_BSHK, k_BTGK, v_BTGK):
        of_rows = functools.partial(cudnn_sequences.in_rows, rows=shape[0], device=q_BSHK.device)
        places = of_rows(shape[1], sizes_B=None), of_rows(keys, sizes_B=length_B)
        heads = tuple(x.flatten(0, 1) for x in (q_BSHK, k_BTGK, v_BTGK))
        y = cudnn_sequences.attention(heads, places, causal=False, scale=scale)
        if y is not None:
            return y.view(shape)
    options = _varlen_options(scale, grouped=shape[2] != k_BTGK.shape[2], causal=False)
    if options.pop("repeat", False):
        k_BTGK, v_BTGK = (x.repeat_interleave(shape[2] // x.shape[2], dim=2) for x in (k_BTGK, v_BTGK))
    bounds = of_queries = _padded_bounds(length_B.int(), keys)
    if not own_rows:
        of_queries = _padded_bounds(torch.full_like(length_B, shape[1], dtype=torch.int32), shape[1])
    flat = (x.flatten(0, 1) for x in (q_BSHK, k_BTGK, v_BTGK))
    y_NHK: Tensor = _varlen()(*flat, of_queries, bounds, shape[1], keys, **options)
    return y_NHK.view(shape)


def _padded_bounds(length_B: Tensor, length: int) -> Tensor:
    """Where the real tokens and the padding of each row begin in the flat tokens, then their number: int32."""
    first_B = torch.arange(len(length_B), device=length_B.device, dtype=torch.int32) * length
    return F.pad(torch.stack((first_B, first_B + length_B), dim=1).flatten(), (0, 1), value=len(length_B) * length)


def chunk_bounds(bounds: Tensor, length: int, *, end: int, chunk: int) -> tuple[Tensor, Tensor]:
    """The documents' bounds among the queries of a chunk of each row, and among the row's tokens up to its end.

    A document's queries correspond to the last of its keys, as flash attention aligns a causal mask if the lengths
    differ; documents before the chunk have no queries.

    Args:
        bounds: int32, of documents in concatenated rows of `length` tokens; includes the bounds of rows.
        end: of the chunk in the row. chunk: its tokens.
    """
    if end == chunk == length:
        return bounds, bounds
    row, column = bounds // length, (bounds % length).clamp(max=end)
    return row * chunk + (column - (end - chunk)).clamp(min=0), row * end + column


def ragged_attention(
    q_NHK: Tensor,
    k_MGK: Tensor,
    v_MGK: Tensor,
    counts: tuple[int, ...],
    lengths: tuple[int, ...],
    scores: ScoreShape,
    tensors: ScoreTensors,
) -> Tensor:
    """See plain.ragged_attention: one call of flash attention for all rows, whatever their lengths.

    Prompts are read without gradients, so the operator is called without `varlen_attn`, which took 0.5 ms of the host
    a block and does not take grouped heads in every version of PyTorch.
    """
    changed = scores.softcap or scores.alibi or scores.relative or scores.sinks != "none"
    if changed or q_NHK.dtype not in HALF or q_NHK.shape[-1] % 8:
        return plain.ragged_attention(q_NHK, k_MGK, v_MGK, counts, lengths, scores, tensors)
    bounds = _ragged_bounds(counts, lengths, q_NHK.device)
    if len(q_NHK) >= MANY_QUERIES and not scores.window and cudnn_sequences.takes(q_NHK, k_MGK, v_MGK):
        of_queries = of_keys = cudnn_sequences.Places(bounds[0], max(counts))
        if counts != lengths:
            of_keys = cudnn_sequences.Places(bounds[1], max(lengths))
        heads, scale = (q_NHK, k_MGK, v_MGK), scores.scale or None
        y = cudnn_sequences.attention(heads, (of_queries, of_keys), causal=True, scale=scale)
        if y is not None:
            return y
    y_NHK: Tensor = torch.ops.aten._flash_attention_forward(
        q_NHK, k_MGK, v_MGK, *bounds, max(counts), max(lengths),
        0.0, True, False,  # dropout, causal, no matrix for debugging
        scale=scores.scale or None,
        window_size_left=scores.window - 1 if scores.window else None,
        window_size_right=0 if scores.window else None,
    )[0]  # fmt: skip
    return y_NHK


@functools.lru_cache(maxsize=4)
def _ragged_bounds(counts: tuple[int, ...], lengths: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """Where rows begin among the queries and among the keys, int32, on the device; the same in all blocks of a step."""
    ends = [list(itertools.accumulate(part, initial=0)) for part in (counts, lengths)]
    return torch.tensor(ends, dtype=torch.int32).pin_memory().to(device, non_blocking=True).unbind()


def scored_attention(
    q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, scores: ScoreShape, tensors: ScoreTensors
) -> Tensor:
    """See plain.scored_attention."""
    if tensors.mask_BHST is not None and q_BSHK.shape[2] == k_BTGK.shape[2]:
        return _masked_attention(q_BSHK, k_BTGK, v_BTGK, scores, tensors)
    if biased_attention.takes(q_BSHK, k_BTGK, tensors):
        return biased_attention.biased_attention(q_BSHK, k_BTGK, v_BTGK, scores, tensors)
    if tensors.keep_BHST is not None or tensors.bias_HST is not None:
        return plain.scored_attention(q_BSHK, k_BTGK, v_BTGK, scores, tensors)
    if scores.operation(documents=tensors.document_BS is not None) == "padded_attention" and q_BSHK.dtype in HALF:
        return padded_attention(q_BSHK, k_BTGK, v_BTGK, tensors.length_B, scores.scale or None, own_rows=False)
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

    batch, queries, heads, width = q_BSHK.shape
    document_BT, slope_H = tensors.document_BS, tensors.slope_H
    place_S = tensors.column_S
    mask = create_block_mask(
        _visible(scores, document_BT, place_S, tensors.length_B),
        batch if document_BT is not None or tensors.length_B is not None else None,
        None,
        queries,
        k_BTGK.shape[1],
        device=str(q_BSHK.device),
    )
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
    y_BHSK, beside = _flex()(
        q,
        k,
        v,
        score_mod=_changed(scores.softcap, slope_H, place_S),
        block_mask=mask,
        scale=scores.factor(width),
        enable_gqa=heads != k.shape[1],
        kernel_options=_flex_options(),
        return_aux=AuxRequest(lse=True),
    )
    if tensors.sink_H is not None:
        # A softmax with one more logit is the softmax without it, times the share that the sink does not take.
        share = (beside.lse - tensors.sink_H.view(1, -1, 1)).sigmoid()
        y_BHSK = (y_BHSK * share.unsqueeze(-1)).to(q.dtype)
    return y_BHSK.transpose(1, 2)


def bias_mask(
    bias_HST: Tensor, scores: ScoreShape, length_B: Tensor | None, dtype: torch.dtype, width: int = 0
) -> Tensor | None:
    """See plain.bias_mask: biases in 16 bits, and -inf where a key is hidden: [B or 1, H, S, T].

    None where the kernels of biased_attention.py read the biases themselves.
    """
    reads_none = dtype not in HALF or scores.dropout or biased_attention.works(bias_HST.device, dtype, width)
    return None if reads_none else additive_mask(bias_HST, scores, length_B, dtype)


def additive_mask(bias_HST: Tensor, scores: ScoreShape, length_B: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What `_masked_attention` adds to scores."""
    queries, keys = bias_HST.shape[1:]
    token = torch.arange(keys, device=bias_HST.device)
    hidden = ((token > token[:queries, None]) & scores.causal)[None, None]
    if length_B is not None:
        hidden = hidden | (token >= length_B.unsqueeze(1))[:, None, None]
    more = -keys % MASK_MULTIPLE
    wide_HST = F.pad(bias_HST.detach().to(dtype), (0, more))
    return wide_HST.masked_fill(F.pad(hidden, (0, more), value=True), -math.inf)[..., :keys]


def _masked_attention(
    q_BSHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, scores: ScoreShape, tensors: ScoreTensors
) -> Tensor:
    """Attention with the mask instead of biases, causality and lengths; the gradient is that of the biases."""
    bias_HST, mask_BHST, batch = tensors.bias_HST, tensors.mask_BHST, len(q_BSHK)
    assert bias_HST is not None and mask_BHST is not None, "a mask is made of biases"
    mask_BHST = _BiasOfMask.apply(bias_HST, mask_BHST.expand(batch, -1, -1, -1))
    q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k_BTGK, v_BTGK))
    with _with_gradient_of_mask() if q.is_cuda else nullcontext():
        y_BHSK = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BHST, scale=scores.factor(q.shape[-1]))
    return y_BHSK.transpose(1, 2)


def _with_gradient_of_mask() -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])  # MATH: sizes that it refuses


class _BiasOfMask(torch.autograd.Function):
    """Gives the mask; its gradient, summed over rows in at least fp32, is that of the biases.

    In each layer, so that the sums of layers are those of one matrix of scores for all rows, and not rounded.
    """

    @staticmethod
    def forward(ctx: Any, bias_HST: Tensor, mask_BHST: Tensor) -> Tensor:
        ctx.dtype = bias_HST.dtype
        return mask_BHST.view_as(mask_BHST)

    @staticmethod
    def backward(ctx: Any, grad_BHST: Tensor) -> tuple[Tensor, None]:
        return grad_BHST.sum(0, dtype=ctx.dtype), None


def _visible(
    scores: ScoreShape, document_BT: Tensor | None, place_S: Tensor | None, length_B: Tensor | None
) -> Callable[..., Tensor]:
    def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        place = i if place_S is None else place_S[i]
        is_visible = place >= j if scores.causal else j >= 0
        if scores.window:
            is_visible = is_visible & (place - j < scores.window)
        if length_B is not None:
            is_visible = is_visible & (j < length_B[b])
        return is_visible if document_BT is None else is_visible & (document_BT[b, place] == document_BT[b, j])

    return mask


def _changed(softcap: float, slope_H: Tensor | None, place_S: Tensor | None) -> Callable[..., Tensor] | None:
    if not softcap and slope_H is None:
        return None

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = softcap * (score / softcap).tanh() if softcap else score
        if slope_H is None:
            return score
        return score - slope_H[h] * ((i if place_S is None else place_S[i]) - j)

    return change


@functools.cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Compiled separately for each length: with symbolic lengths a score function that captures tensors fails to compile
    # (PyTorch 2.11). A model has one set of options, and few lengths.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FLEX_VARIANTS)
    return torch.compile(flex_attention, dynamic=False)


@functools.cache
def _flex_options() -> dict[str, Any]:
    """Keywords that disable FlexAttention's decoding kernel for short queries, which cannot handle 127 queries."""
    from torch.nn.attention import flex_attention

    named = "BACKEND" in flex_attention.FlexKernelOptions.__annotations__
    return {"BACKEND": "TRITON"} if named else {"FORCE_USE_FLEX_ATTENTION": True}


@functools.cache
def _varlen() -> Callable[..., Any]:
    """Its module imports the compiler, which no start should wait for; its keywords differ between versions."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of its parameters, which take longer to find than a kernel to launch."""
    return tuple(inspect.signature(function).parameters)


def _varlen_options(scale: float | None, *, grouped: bool, causal: bool = True) -> dict[str, Any]:
    """The call's keywords, whose names differ between versions of PyTorch."""
    parameters = _parameters(_varlen())
    options: dict[str, Any] = {"is_causal": causal}
    if "is_causal" not in parameters:
        options = {"window_size": (-1, 0) if causal else (-1, -1)}
    if scale is not None:
        options["scale"] = scale
    if grouped:
        options["enable_gqa" if "enable_gqa" in parameters else "repeat"] = True
    return options


def grouped_product(x_MI: Tensor, weight_EOI: Tensor, end_E: Tensor) -> Tensor:
    """See plain.grouped_product; rows of no group have no meaning."""
    if not _can_group(x_MI, weight_EOI.shape[1:]):
        return plain.grouped_product(x_MI, weight_EOI, end_E)
    product: Tensor = F.grouped_mm(x_MI, weight_EOI.transpose(1, 2), offs=end_E)
    return product


def float8_grouped_product(
    x_MK: Tensor, right_ENK: Float8Rows, end_E: Tensor, *, quantize: Callable[[Tensor], Float8Rows] = float8_rows
) -> Tensor:
    """See float8.float8_rows_grouped_product; rows of no group have no meaning."""
    if not len(x_MK) or any(width % MULTIPLE for width in right_ENK.values_RC.shape[1:]):
        return widened_grouped_product(x_MK, right_ENK, end_E)
    rows_MK = quantize(x_MK)
    product: Tensor = torch._scaled_grouped_mm(
        rows_MK.values_RC.contiguous(),
        right_ENK.values_RC.transpose(1, 2),
        rows_MK.inverse_R1.squeeze(1),
        right_ENK.inverse_R1.squeeze(2),
        offs=end_E,
        out_dtype=x_MK.dtype,
        use_fast_accum=True,
    )
    return product


def widened_grouped_product(x_MK: Tensor, right_ENK: Float8Rows, end_E: Tensor) -> Tensor:
    """The same where there is no such product: x is not rounded, and all matrices exist for a moment in its dtype."""
    return grouped_product(x_MK, float8_rows_matrix(right_ENK, dtype=x_MK.dtype), end_E)


def add_grouped_product(
    target_EOI: Tensor, dy_MO: Tensor, *, x_MI: Tensor, end_E: Tensor, overwrite: bool = False
) -> None:
    """See plain.add_grouped_product; without Triton the product is rounded to 16 bits before it is added."""
    if not _can_group(x_MI, target_EOI.shape[1:]):
        plain.add_grouped_product(target_EOI, dy_MO, x_MI=x_MI, end_E=end_E, overwrite=overwrite)
        return
    if target_EOI.is_contiguous() and adds_with_triton(x_MI.device):
        add_with_triton(target_EOI, dy_MO, x_MI=x_MI, end_E=end_E, overwrite=overwrite)
        return
    add_with_torch(target_EOI, dy_MO, x_MI=x_MI, end_E=end_E, overwrite=overwrite)


def add_with_torch(target_EOI: Tensor, dy_MO: Tensor, *, x_MI: Tensor, end_E: Tensor, overwrite: bool = False) -> None:
    """The gradients as products of 16 bits that are then added."""
    product_EOI = F.grouped_mm(dy_MO.t(), x_MI, offs=end_E)
    if overwrite:
        target_EOI.copy_(product_EOI)
    else:
        target_EOI.add_(product_EOI)


def add_with_triton(
    target_EOI: Tensor,
    dy_MO: Tensor,
    *,
    x_MI: Tensor,
    end_E: Tensor,
    overwrite: bool = False,
    block: tuple[int, int] = GRADIENT_BLOCK,
) -> None:
    """The gradients by a kernel that adds fp32 sums; the target is contiguous."""
    kernel, (experts, outputs, inputs) = _triton_kernel(), target_EOI.shape
    assert kernel is not None, "triton is not installed"
    blocks = -(-outputs // block[0]) * -(-inputs // block[1])
    kernel[(blocks, experts)](
        target_EOI, dy_MO.contiguous(), x_MI.contiguous(), end_E, outputs, inputs,
        OVERWRITE=overwrite, BLOCK_O=block[0], BLOCK_I=block[1], BLOCK_M=64, NEAR=4, num_warps=8, num_stages=4,
    )  # fmt: skip


@functools.cache
def adds_with_triton(device: torch.device) -> bool:
    """Whether a trial gives what the plain function gives; older GPUs lack the shared memory that blocks need."""
    is_new = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    if not is_new or _triton_kernel() is None:
        return False
    generator = torch.Generator(device).manual_seed(1)
    # Multiples of 16 as in models: of others loads are not pipelined, which takes less memory.
    dy_MO, x_MI = (torch.randn(200, n, generator=generator, device=device).bfloat16() for n in (144, 272))
    end_E = torch.tensor([70, 70, 199], dtype=torch.int32, device=device)
    ours, twin = (torch.ones(3, 144, 272, device=device) for _ in range(2))
    for overwrite in (False, True):
        try:
            add_with_triton(ours, dy_MO, x_MI=x_MI, end_E=end_E, overwrite=overwrite)
        except refusals():
            return False
        plain.add_grouped_product(twin, dy_MO, x_MI=x_MI, end_E=end_E, overwrite=overwrite)
        if not float((ours - twin).norm() / twin.norm()) < 1e-4:
            return False
    return True


@functools.cache
def _triton_kernel() -> Any:
    """Compiled when it is first called; None without Triton."""
    try:
        from trainer.kernels.grouped_triton import add_gradients
    except ImportError:
        return None
    return add_gradients


def _can_group(x: Tensor, widths: torch.Size) -> bool:
    """Whether torch's grouped products take these: they begin without waiting for the host, which loops do."""
    return x.dtype == torch.bfloat16 and len(x) > 0 and not any(width % GROUPED_ALIGNMENT for width in widths)
