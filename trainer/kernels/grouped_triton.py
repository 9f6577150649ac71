"""The Triton kernel of gpu.add_grouped_product, in a module of its own because Triton is imported where it is used.

Triton compiles the function from its source: its arguments are pointers, numbers, and constants in capitals.
"""

# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_O, BLOCK_I, BLOCK_M, WARPS, STAGES = 128, 256, 64, 8, 4  # the fastest of six, on an H100


def add_weight_gradient(
    target_EOI: Tensor, dy_MO: Tensor, *, x_MI: Tensor, end_E: Tensor, overwrite: bool = False
) -> None:
    """See plain.add_grouped_product: 16-bit operands, each tile summed in fp32 over the rows of its expert.

    The order of the sum depends on the rows alone, so that a repeated run gives the same bits.
    """
    experts, outputs, inputs = target_EOI.shape
    dy_MO, x_MI = dy_MO.contiguous(), x_MI.contiguous()
    assert target_EOI.stride()[1:] == (inputs, 1), "a whole matrix of each expert"
    grid = (triton.cdiv(outputs, BLOCK_O) * triton.cdiv(inputs, BLOCK_I), experts)
    with torch.cuda.device(target_EOI.device):
        add_tile[grid](
            target_EOI, dy_MO, x_MI, end_E, outputs, inputs, target_EOI.stride(0),
            BLOCK_O=BLOCK_O, BLOCK_I=BLOCK_I, BLOCK_M=BLOCK_M, OVERWRITE=overwrite, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip


@triton.jit
def add_tile(
    target, dy, x, end, outputs, inputs, expert_stride,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_M: tl.constexpr, OVERWRITE: tl.constexpr,
):  # fmt: skip
    """One tile of one expert's gradient: dy^T x over the expert's rows, which end[expert - 1] and end[expert] bound."""
    tile, expert = tl.program_id(0), tl.program_id(1)
    stop = tl.load(end + expert)
    start = tl.load(end + expert - 1, mask=expert > 0, other=0)
    if OVERWRITE or start < stop:
        across = tl.cdiv(inputs, BLOCK_I)
        o = (tile // across) * BLOCK_O + tl.arange(0, BLOCK_O)
        i = (tile % across) * BLOCK_I + tl.arange(0, BLOCK_I)
        is_output, is_input = o < outputs, i < inputs
        sum_OI = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
        for first in range(start, stop, BLOCK_M):
            row = first + tl.arange(0, BLOCK_M)
            there = row < stop
            at = row.to(tl.int64)[:, None]
            dy_MO = tl.load(dy + at * outputs + o[None, :], mask=there[:, None] & is_output[None, :], other=0.0)
            x_MI = tl.load(x + at * inputs + i[None, :], mask=there[:, None] & is_input[None, :], other=0.0)
            sum_OI = tl.dot(tl.trans(dy_MO), x_MI, sum_OI)
        place = target + expert.to(tl.int64) * expert_stride + o.to(tl.int64)[:, None] * inputs + i[None, :]
        is_here = is_output[:, None] & is_input[None, :]
        if not OVERWRITE:
            sum_OI += tl.load(place, mask=is_here, other=0.0)
        tl.store(place, sum_OI, mask=is_here)
