"""Attention of one token of each row to keys in pages, on a GPU: flash decoding as two Triton kernels of ours.

One token of a row is too little work for a GPU, so the keys of a row are divided over several programs (Dao et al.
2023, "Flash-Decoding"): each keeps a running softmax of its part, and a second kernel merges the parts. How many parts
there are depends on the number of rows and not on their lengths, so the launch can be recorded in a CUDA graph. All
query heads of a key-value head are one product. The program of a row's last part first writes the new key and value
into their page. The twin is `plain.paged_attention`; it is also what runs where
Triton is missing or a trial at the first call differs.

Shapes: B rows, P pages of the longest row, T tokens of a page, H query heads, G key-value heads, R = H / G, K head
width, S parts of a row.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from trainer.kernels import plain
from trainer.kernels.plain import ScoreTensors
from trainer.kernels.scores import ScoreShape
from trainer.kernels.self_test import refusals

BLOCK_TOKENS = 64  # of one product
PROGRAMS = 4  # for each multiprocessor, if rows are long enough
TRIAL_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


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
    """See plain.paged_attention."""
    groups, width = key_PTGK.shape[2:]
    shared = k_BGK.shape != v_BGK.shape  # values are a part of keys, as in latent attention
    if (
        scores.relative
        or shared
        or not works(q_BHK.device, q_BHK.dtype, heads=q_BHK.shape[1], groups=groups, width=width)
    ):
        return plain.paged_attention(q_BHK, k_BGK, v_BGK, key_PTGK, value_PTGK, table_BP, length_B, scores, tensors)
    return launch(q_BHK, k_BGK, v_BGK, key_PTGK, value_PTGK, table_BP, length_B, scores, tensors)


@functools.cache
def works(device: torch.device, dtype: torch.dtype, *, heads: int, groups: int, width: int) -> bool:
    """Whether a trial gives what the plain function gives."""
    if dtype not in TRIAL_TOLERANCE or _kernels() is None:
        return False
    generator = torch.Generator(device).manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    table_BP = torch.arange(1, 21, device=device, dtype=torch.int32).view(2, 10).flip(1)
    length_B = torch.tensor([149, 3], device=device, dtype=torch.int32)
    new = drawn(2, heads, width), drawn(2, groups, width), drawn(2, groups, width)
    pools = drawn(2, 21, 16, groups, width)
    theirs = pools.clone()
    scores, tensors = ScoreShape(window=140), ScoreTensors()
    try:
        ours = launch(*new, pools[0], pools[1], table_BP, length_B, scores, tensors)
    except refusals():  # wide heads need more shared memory than there is
        return False
    twin = plain.paged_attention(*new, theirs[0], theirs[1], table_BP, length_B, scores, tensors)
    difference = (ours.float() - twin.float()).abs().max()
    return bool(difference <= TRIAL_TOLERANCE[dtype]) and torch.equal(pools, theirs)


def launch(
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
    """The kernels; see plain.paged_attention."""
    (batch, heads, width), (page, groups) = q_BHK.shape, key_PTGK.shape[1:3]
    kernels = _kernels()
    assert kernels is not None, "triton is not installed"
    attend_part, merge = kernels
    each, parts = heads // groups, _parts(q_BHK.device, batch * groups)
    q_BHK, k_BGK, v_BGK, table_BP = (x.contiguous() for x in (q_BHK, k_BGK, v_BGK, table_BP))
    options: dict[str, Any] = {"dtype": torch.float32, "device": q_BHK.device}
    sum_BGSRK = torch.empty(batch, groups, parts, each, width, **options)
    state_BGSR2 = torch.empty(batch, groups, parts, each, 2, **options)  # the largest score, the sum of exponentials
    y_BHK = torch.empty_like(q_BHK)
    nothing = length_B
    block_width = _power_of_2(width)
    attend_part[(batch, groups, parts)](
        q_BHK, k_BGK, v_BGK, key_PTGK, value_PTGK, table_BP, length_B,
        nothing if tensors.slope_H is None else tensors.slope_H,
        sum_BGSRK, state_BGSR2,
        scores.factor(width), scores.softcap, scores.window, table_BP.stride(0),
        GROUPS=groups, EACH=each, WIDTH=width, PAGE=page, PARTS=parts,
        BLOCK_R=max(16, _power_of_2(each)), BLOCK_K=max(16, block_width), BLOCK_T=BLOCK_TOKENS,
        HAS_SLOPE=tensors.slope_H is not None, HAS_CAP=bool(scores.softcap), HAS_WINDOW=bool(scores.window),
        PRECISION="ieee" if q_BHK.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=2,
    )  # fmt: skip
    merge[(batch, heads)](
        sum_BGSRK, state_BGSR2, nothing if tensors.sink_H is None else tensors.sink_H, y_BHK,
        GROUPS=groups, EACH=each, WIDTH=width, PARTS=parts,
        BLOCK_S=_power_of_2(parts), BLOCK_K=block_width, HAS_SINK=tensors.sink_H is not None,
        num_warps=4,
    )  # fmt: skip
    return y_BHK


def _parts(device: torch.device, heads: int) -> int:
    """Into how many parts each row is divided, so that all multiprocessors have work."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
    return max(1, min(64, math.ceil(PROGRAMS * processors / heads)))


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


@functools.cache
def _kernels() -> tuple[Any, Any] | None:
    """(attend_part, merge), compiled when they are first called; None without Triton."""
    try:
        from trainer.kernels.paged_triton import attend_part, merge
    except ImportError:
        return None
    return attend_part, merge
