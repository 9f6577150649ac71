"""The Triton kernels of biased_attention.py; Triton is imported on use.

Programs of one block of queries or keys of one head of one row, in base 2; keys behind a row's length are not read, and
queries behind it (`of_rows`) give zeros. The bias has no row, so its gradient is a sum over rows: each program of
`bias_gradient` has one block of scores of one head, and adds up the rows in their order.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile(x, row, head, token, tokens, rows, WIDTH: tl.constexpr):
    """Features of some tokens of a head: `rows` has the strides of rows, tokens and heads."""
    feature = tl.arange(0, WIDTH)
    at = x + row.to(tl.int64) * rows[0] + token.to(tl.int64)[:, None] * rows[1] + head * rows[2] + feature[None, :]
    return tl.load(at, mask=(token < tokens)[:, None], other=0.0)


@triton.jit
def _put(x, value, row, head, token, tokens, heads, WIDTH: tl.constexpr):
    """Store features of some tokens of a head, in rows without gaps."""
    at = ((row.to(tl.int64) * tokens + token[:, None]) * heads + head) * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(x + at, value.to(x.dtype.element_ty), mask=(token < tokens)[:, None])


@triton.jit
def _scores(q, k, bias, head, query, key, queries, keys, visible, scale, CAUSAL: tl.constexpr):
    """Scores with biases in base 2; -inf where a query does not see a key."""
    there = (query < queries)[:, None] & (key < visible)[None, :]
    if CAUSAL:
        there = there & (key[None, :] <= query[:, None])
    at = bias + (head * queries + query[:, None]) * keys + key[None, :]
    added = tl.load(at, mask=there, other=0.0).to(tl.float32)
    score = (tl.dot(q, tl.trans(k)) * scale + added) * 1.4426950408889634
    return tl.where(there, score, float("-inf"))


@triton.jit
def _ends(lengths, row, queries, keys, LENGTHS: tl.constexpr, OF_ROWS: tl.constexpr):
    """Queries of a row that count, and keys that they see."""
    visible = keys
    if LENGTHS:
        visible = tl.minimum(tl.load(lengths + row).to(tl.int32), keys)
    counted = queries
    if OF_ROWS:
        counted = visible
    return counted, visible


@triton.jit
def forward(
    q, k, v, bias, lengths, y, log_sum, of_q, of_k, of_v, heads, queries, keys, scale,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, LENGTHS: tl.constexpr, OF_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The output, and the logarithm of each query's sum."""
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    counted, visible = _ends(lengths, row, queries, keys, LENGTHS, OF_ROWS)
    total = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    end = visible
    if CAUSAL:
        end = tl.minimum(visible, tl.program_id(0) * BLOCK_M + BLOCK_M)
    if tl.program_id(0) * BLOCK_M < counted:
        q_tile = _tile(q, row, head, query, queries, of_q, WIDTH)
        for first in range(0, end, BLOCK_N):
            key = first + tl.arange(0, BLOCK_N)
            k_tile = _tile(k, row, head, key, visible, of_k, WIDTH)
            score = _scores(q_tile, k_tile, bias, head, query, key, queries, keys, visible, scale, CAUSAL)
            grown = tl.maximum(largest, tl.max(score, 1))
            grown = tl.where(grown == float("-inf"), 0.0, grown)  # of a query behind the last
            part = tl.exp2(score - grown[:, None])
            shrink = tl.exp2(largest - grown)
            weight = weight * shrink + tl.sum(part, 1)
            v_tile = _tile(v, row, head, key, visible, of_v, WIDTH)
            total = total * shrink[:, None] + tl.dot(part.to(v_tile.dtype), v_tile)
            largest = grown
    is_counted = (query < counted) & (weight > 0)
    value = tl.where(is_counted[:, None], total / tl.where(is_counted, weight, 1.0)[:, None], 0.0)
    _put(y, value, row, head, query, queries, heads, WIDTH)
    logarithm = tl.where(is_counted, largest + tl.log2(tl.where(is_counted, weight, 1.0)), float("inf"))
    tl.store(log_sum + tl.program_id(1).to(tl.int64) * queries + query, logarithm, mask=query < queries)


@triton.jit
def query_gradient(
    q, k, v, bias, lengths, y, dy, log_sum, delta, dq, of_q, of_k, of_v, of_y, heads, queries, keys, scale,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, LENGTHS: tl.constexpr, OF_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradient of queries; and `delta`, the product of each output with its gradient."""
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    counted, visible = _ends(lengths, row, queries, keys, LENGTHS, OF_ROWS)
    total = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    end = visible
    if CAUSAL:
        end = tl.minimum(visible, tl.program_id(0) * BLOCK_M + BLOCK_M)
    if tl.program_id(0) * BLOCK_M < counted:
        at = tl.program_id(1).to(tl.int64) * queries + query
        q_tile = _tile(q, row, head, query, queries, of_q, WIDTH)
        dy_tile = _tile(dy, row, head, query, queries, of_y, WIDTH)
        y_tile = _tile(y, row, head, query, queries, (queries * heads * WIDTH, heads * WIDTH, WIDTH), WIDTH)
        mine = tl.sum(y_tile.to(tl.float32) * dy_tile.to(tl.float32), 1)
        tl.store(delta + at, mine, mask=query < queries)
        logarithm = tl.load(log_sum + at, mask=query < queries, other=float("inf"))
        for first in range(0, end, BLOCK_N):
            key = first + tl.arange(0, BLOCK_N)
            k_tile = _tile(k, row, head, key, visible, of_k, WIDTH)
            score = _scores(q_tile, k_tile, bias, head, query, key, queries, keys, visible, scale, CAUSAL)
            part = tl.exp2(score - logarithm[:, None])
            v_tile = _tile(v, row, head, key, visible, of_v, WIDTH)
            change = part * (tl.dot(dy_tile, tl.trans(v_tile)) - mine[:, None])
            total += tl.dot(change.to(k_tile.dtype), k_tile)
    _put(dq, total * scale, row, head, query, queries, heads, WIDTH)


@triton.jit
def key_gradients(
    q, k, v, bias, lengths, dy, log_sum, delta, dk, dv, of_q, of_k, of_v, of_y, heads, queries, keys, scale,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, LENGTHS: tl.constexpr, OF_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values, after `query_gradient`."""
    row, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    key = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    counted, visible = _ends(lengths, row, queries, keys, LENGTHS, OF_ROWS)
    dk_tile, dv_tile = tl.zeros([BLOCK_N, WIDTH], tl.float32), tl.zeros([BLOCK_N, WIDTH], tl.float32)
    begin = 0
    if CAUSAL:
        begin = (tl.program_id(0) * BLOCK_N // BLOCK_M) * BLOCK_M
    if tl.program_id(0) * BLOCK_N < visible:
        k_tile = _tile(k, row, head, key, visible, of_k, WIDTH)
        v_tile = _tile(v, row, head, key, visible, of_v, WIDTH)
        for first in range(begin, counted, BLOCK_M):
            query = first + tl.arange(0, BLOCK_M)
            at = tl.program_id(1).to(tl.int64) * queries + query
            q_tile = _tile(q, row, head, query, queries, of_q, WIDTH)
            dy_tile = _tile(dy, row, head, query, queries, of_y, WIDTH)
            score = _scores(q_tile, k_tile, bias, head, query, key, queries, keys, visible, scale, CAUSAL)
            logarithm = tl.load(log_sum + at, mask=query < counted, other=float("inf"))
            mine = tl.load(delta + at, mask=query < counted, other=0.0)
            part = tl.exp2(score - logarithm[:, None])
            dv_tile += tl.dot(tl.trans(part.to(dy_tile.dtype)), dy_tile)
            change = part * (tl.dot(dy_tile, tl.trans(v_tile)) - mine[:, None])
            dk_tile += tl.dot(tl.trans(change.to(q_tile.dtype)), q_tile)
    _put(dk, dk_tile * scale, row, head, key, keys, heads, WIDTH)
    _put(dv, dv_tile, row, head, key, keys, heads, WIDTH)


@triton.jit
def bias_gradient(
    q, k, v, bias, lengths, dy, log_sum, delta, dbias, of_q, of_k, of_v, of_y, batch, heads, queries, keys, scale,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, LENGTHS: tl.constexpr, OF_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradient of the biases, a sum over rows, after `query_gradient`."""
    head = tl.program_id(2)
    query = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    key = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    is_seen = True
    if CAUSAL:
        is_seen = tl.program_id(0) * BLOCK_N < tl.program_id(1) * BLOCK_M + BLOCK_M
    if is_seen:
        for row in range(0, batch):
            counted, visible = _ends(lengths, row, queries, keys, LENGTHS, OF_ROWS)
            if (tl.program_id(1) * BLOCK_M < counted) & (tl.program_id(0) * BLOCK_N < visible):
                which = row + tl.zeros([], tl.int32)
                at = (which.to(tl.int64) * heads + head) * queries + query
                q_tile = _tile(q, which, head, query, queries, of_q, WIDTH)
                k_tile = _tile(k, which, head, key, visible, of_k, WIDTH)
                v_tile = _tile(v, which, head, key, visible, of_v, WIDTH)
                dy_tile = _tile(dy, which, head, query, queries, of_y, WIDTH)
                score = _scores(q_tile, k_tile, bias, head, query, key, queries, keys, visible, scale, CAUSAL)
                logarithm = tl.load(log_sum + at, mask=query < counted, other=float("inf"))
                mine = tl.load(delta + at, mask=query < counted, other=0.0)
                part = tl.exp2(score - logarithm[:, None])
                total += part * (tl.dot(dy_tile, tl.trans(v_tile)) - mine[:, None])
    at = dbias + (head * queries + query[:, None]) * keys + key[None, :]
    tl.store(at, total.to(dbias.dtype.element_ty), mask=(query < queries)[:, None] & (key < keys)[None, :])
