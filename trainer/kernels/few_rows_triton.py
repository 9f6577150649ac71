"""The Triton kernel of few_rows.py, in a module of its own because Triton is imported where it is used.

Triton compiles the function from its source: its arguments are pointers, numbers, and constants in capitals.
"""

# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)  # of E4M3


@triton.jit
def multiply(
    x, weight, inverse, y, outputs, width, x_stride,
    BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Some outputs of one token. FP8: both factors are rounded, the token here, with the scale of its largest value.

    Programs of several tokens and the same outputs run beside each other, so the weight is read once.
    """
    token, o = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = tl.arange(0, BLOCK_I)
    scale = 1.0
    if FP8:
        largest_I = tl.zeros([BLOCK_I], tl.float32)
        for first in range(0, width, BLOCK_I):
            x_I = tl.load(x + token * x_stride + first + i, mask=first + i < width, other=0.0).to(tl.float32)
            largest_I = tl.maximum(largest_I, tl.abs(x_I))
        largest = tl.max(largest_I, 0)
        scale = LARGEST / largest
        scale = tl.where((largest > 0) & (largest < float("inf")) & (scale < float("inf")), scale, 1.0)
    sum_OI = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    row_O = o.to(tl.int64)[:, None] * width
    for first in tl.range(0, width, BLOCK_I, num_stages=STAGES):
        there = first + i < width
        w_OI = tl.load(weight + row_O + (first + i)[None, :], mask=(o < outputs)[:, None] & there[None, :], other=0.0)
        x_I = tl.load(x + token * x_stride + first + i, mask=there, other=0.0).to(tl.float32)
        if FP8:
            x_I = tl.minimum(tl.maximum(x_I * scale, -LARGEST), LARGEST).to(tl.float8e4nv).to(tl.float32)
        sum_OI += w_OI.to(tl.float32) * x_I[None, :]
    y_O = tl.sum(sum_OI, 1)
    if FP8:
        y_O = y_O * (1.0 / scale) * tl.load(inverse + o, mask=o < outputs, other=0.0)
    tl.store(y + token * outputs + o, y_O.to(y.dtype.element_ty), mask=o < outputs)
