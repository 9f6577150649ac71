"""The Triton kernels of paged_attention.py, in a module of their own because Triton is imported where it is used.

Triton compiles these functions from their source: their arguments are pointers, numbers, and constants in capitals.
"""

# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend_part(
    q, new_key, new_value, key, value, table, length, slope, sums, states, factor, softcap, window, table_stride,
    GROUPS: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
    HAS_SLOPE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One part of one row for all query heads of a key-value head: a running softmax, not divided yet.

    The program that reads the row's last token writes it first.
    """
    row, group, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    end = tl.load(length + row).to(tl.int32)
    begin = end * 0
    if HAS_WINDOW:
        begin = tl.maximum(end - window, 0)
    span = tl.cdiv(tl.cdiv(end - begin, PARTS), BLOCK_T) * BLOCK_T
    start = begin + part * span
    stop = tl.minimum(start + span, end)
    r, k = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    is_head, is_feature = r < EACH, k < WIDTH
    head = group * EACH + r
    if (start < end) & (stop == end):
        page = tl.load(table + row * table_stride + (end - 1) // PAGE).to(tl.int64)
        at_K = ((page * PAGE + (end - 1) % PAGE) * GROUPS + group) * WIDTH + k
        new_K = (row * GROUPS + group) * WIDTH + k
        tl.store(key + at_K, tl.load(new_key + new_K, mask=is_feature), mask=is_feature)
        tl.store(value + at_K, tl.load(new_value + new_K, mask=is_feature), mask=is_feature)
    tl.debug_barrier()  # all threads of the program see what some have written
    q_at = (row * GROUPS * EACH + head[:, None]) * WIDTH + k[None, :]
    q_RK = tl.load(q + q_at, mask=is_head[:, None] & is_feature[None, :], other=0.0)
    largest = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    sum_RK = tl.zeros([BLOCK_R, BLOCK_K], tl.float32)
    for first in range(start, stop, BLOCK_T):
        token = first + tl.arange(0, BLOCK_T)
        there = token < stop
        page = tl.load(table + row * table_stride + token // PAGE, mask=there, other=0).to(tl.int64)
        at = ((page * PAGE + token % PAGE) * GROUPS + group) * WIDTH
        at_TK = at[:, None] + k[None, :]
        mask_TK = there[:, None] & is_feature[None, :]
        key_TK = tl.load(key + at_TK, mask=mask_TK, other=0.0)
        score = tl.dot(q_RK, tl.trans(key_TK), input_precision=PRECISION) * factor
        if HAS_CAP:
            bent = tl.exp(-2.0 * tl.abs(score / softcap))
            score = tl.where(score < 0, -softcap, softcap) * (1.0 - bent) / (1.0 + bent)  # tanh
        if HAS_SLOPE:
            slope_R = tl.load(slope + head, mask=is_head, other=0.0).to(tl.float32)
            score = score - slope_R[:, None] * (end - 1 - token)[None, :]
        score = tl.where(there[None, :], score, float("-inf"))
        new = tl.maximum(largest, tl.max(score, 1))
        weight = tl.exp(score - new[:, None])
        shrink = tl.exp(largest - new)
        total = total * shrink + tl.sum(weight, 1)
        value_TK = tl.load(value + at_TK, mask=mask_TK, other=0.0)
        sum_RK = sum_RK * shrink[:, None] + tl.dot(weight.to(value_TK.dtype), value_TK, input_precision=PRECISION)
        largest = new
    place = ((row * GROUPS + group) * PARTS + part) * EACH + r
    tl.store(sums + place[:, None] * WIDTH + k[None, :], sum_RK, mask=is_head[:, None] & is_feature[None, :])
    tl.store(states + place * 2, largest, mask=is_head)
    tl.store(states + place * 2 + 1, total, mask=is_head)


@triton.jit
def merge(
    sums, states, sink, y,
    GROUPS: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr, HAS_SINK: tl.constexpr,
):  # fmt: skip
    """The parts of one row and query head, as one."""
    row, head = tl.program_id(0), tl.program_id(1)
    s, k = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_K)
    there, is_feature = s < PARTS, k < WIDTH
    place = ((row * GROUPS + head // EACH) * PARTS + s) * EACH + head % EACH
    largest_S = tl.load(states + place * 2, mask=there, other=float("-inf"))
    total_S = tl.load(states + place * 2 + 1, mask=there, other=0.0)
    largest = tl.max(largest_S, 0)
    if HAS_SINK:
        sink_1 = tl.load(sink + head).to(tl.float32)
        largest = tl.maximum(largest, sink_1)
    weight_S = tl.exp(largest_S - largest)
    total = tl.sum(weight_S * total_S, 0)
    if HAS_SINK:
        total += tl.exp(sink_1 - largest)
    sum_SK = tl.load(sums + place[:, None] * WIDTH + k[None, :], mask=there[:, None] & is_feature[None, :], other=0.0)
    y_K = tl.sum(weight_S[:, None] * sum_SK, 0) / total
    tl.store(y + (row * GROUPS * EACH + head) * WIDTH + k, y_K.to(y.dtype.element_ty), mask=is_feature)
