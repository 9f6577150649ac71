"""The Triton kernel that adds gradients of experts' weights, see gpu.add_grouped_product; Triton is imported on use.

torch's grouped products write in 16 bits, which a second pass adds to the fp32 gradient; this one adds its fp32 sums
itself, and neither reads nor writes the gradients of experts without rows.
"""

# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_gradients(
    target, dy, x, ends, outputs, inputs,
    OVERWRITE: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_M: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """A block of one expert's dy^T x: [outputs, inputs] of rows [M, outputs] and [M, inputs]."""
    expert, block = tl.program_id(1), tl.program_id(0)
    start = tl.load(ends + tl.maximum(expert - 1, 0))
    start = tl.where(expert == 0, 0, start)
    stop = tl.load(ends + expert)
    # Programs that run together read NEAR blocks of outputs, and of inputs what they share.
    down, across = tl.cdiv(outputs, BLOCK_O), tl.cdiv(inputs, BLOCK_I)
    band = block // (NEAR * across)
    height = tl.minimum(down - band * NEAR, NEAR)
    inside = block % (NEAR * across)
    o = (band * NEAR + inside % height) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = (inside // height) * BLOCK_I + tl.arange(0, BLOCK_I)
    is_output, is_input = o < outputs, i < inputs
    has_work = stop > start
    if OVERWRITE:
        has_work = stop >= start
    if has_work:
        sum_OI = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
        for first in range(start, stop, BLOCK_M):
            row = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
            there = row < stop
            dy_MO = tl.load(
                dy + row[:, None] * outputs + o[None, :], mask=there[:, None] & is_output[None, :], other=0.0
            )
            x_MI = tl.load(x + row[:, None] * inputs + i[None, :], mask=there[:, None] & is_input[None, :], other=0.0)
            sum_OI += tl.dot(tl.trans(dy_MO), x_MI)
        at = target + (expert.to(tl.int64) * outputs + o[:, None]) * inputs + i[None, :]
        mask = is_output[:, None] & is_input[None, :]
        if not OVERWRITE:
            sum_OI += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        tl.store(at, sum_OI.to(target.dtype.element_ty), mask=mask)
