"""Triton kernels over rows of experts, see expert_rows.py; Triton is imported on use.

Where tokens of other ranks are gathered there are rows for the largest possible load, often several times those that
are computed, and only the device knows how many these are. Programs of the others end at once.

Sizes of blocks are numbers of rows and of features. `ends` is where each group's rows end, the last one's at LAST.
"""

# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def take(x, token, ends, y, width, LAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr):
    """Rows of x by number: [A, width] -> [M, width]."""
    first, stop = tl.program_id(0) * BLOCK_M, tl.load(ends + LAST)
    if first < stop:
        row = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        there = row < stop
        origin = tl.load(token + row, mask=there, other=0)
        for begin in range(0, width, BLOCK_F):
            feature = begin + tl.arange(0, BLOCK_F)
            mask = there[:, None] & (feature < width)[None, :]
            values = tl.load(x + origin[:, None] * width + feature[None, :], mask=mask, other=0.0)
            tl.store(y + row[:, None] * width + feature[None, :], values, mask=mask)


@triton.jit
def weigh_swiglu(both, weight, ends, z, width, LAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr):
    """silu(gate) up of each row, rounded, times the row's weight: [M, 2 width] -> [M, width]."""
    first, stop = tl.program_id(0) * BLOCK_M, tl.load(ends + LAST)
    if first < stop:
        row, feature = (first + tl.arange(0, BLOCK_M)).to(tl.int64), tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
        there = row < stop
        mask = there[:, None] & (feature < width)[None, :]
        at = both + row[:, None] * (2 * width) + feature[None, :]
        gate, up = tl.load(at, mask=mask, other=0.0).to(tl.float32), tl.load(at + width, mask=mask, other=0.0)
        y = (gate * tl.sigmoid(gate) * up.to(tl.float32)).to(z.dtype.element_ty).to(tl.float32)
        scale = tl.load(weight + row, mask=there, other=0.0)
        tl.store(z + row[:, None] * width + feature[None, :], (y * scale[:, None]).to(z.dtype.element_ty), mask=mask)


@triton.jit
def weigh_swiglu_gradients(
    dz, both, weight, ends, dboth, dweight, width, LAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr
):
    """Gradients of gate and up [M, 2 width] and of weights [M]; what forward rounds is rounded here, too."""
    first, stop = tl.program_id(0) * BLOCK_M, tl.load(ends + LAST)
    if first < stop:
        row = (first + tl.arange(0, BLOCK_M)).to(tl.int64)
        there = row < stop
        kind = dboth.dtype.element_ty
        scale = tl.load(weight + row, mask=there, other=0.0)
        total = tl.zeros([BLOCK_M], tl.float32)
        for begin in range(0, width, BLOCK_F):
            feature = begin + tl.arange(0, BLOCK_F)
            mask, at = there[:, None] & (feature < width)[None, :], row[:, None] * (2 * width) + feature[None, :]
            gate = tl.load(both + at, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(both + at + width, mask=mask, other=0.0).to(tl.float32)
            change = tl.load(dz + row[:, None] * width + feature[None, :], mask=mask, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            total += tl.sum(change * (gate * sigmoid * up).to(kind).to(tl.float32), 1)
            dy = (change * scale[:, None]).to(kind).to(tl.float32)
            tl.store(dboth + at, (dy * up * sigmoid * (1 + gate * (1 - sigmoid))).to(kind), mask=mask)
            tl.store(dboth + at + width, (dy * gate * sigmoid).to(kind), mask=mask)
        tl.store(dweight + row, total, mask=there)
