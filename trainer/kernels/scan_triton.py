"""The Triton kernels of triton_scan.py, in a module of its own because Triton is imported where it is used.

Chunks of Q tokens, as in scan.py: `states` and `state_gradients` pass from chunk to chunk and keep what each chunk
begins with, `outputs` and `gradients` compute all chunks at once. Products take numbers in the dtype of the activations
and add in fp32; decays and running states are fp32. `log` is the sum of D_t A from the first token of a chunk on, and
does not change behind the last token of a row. A token remains at its chunk's end, and reads the state before it,
only if the document is the same.

A program of the convolution goes over tokens one by one, four at a time so that their loads are under way together. It
keeps the last three and, in backward, their gradients, so that each number is read once.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _dot(left, right):
    """Of fp32 numbers the exact product, and not that of numbers rounded to TF32."""
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _document(document, row, t, length, DOCUMENTS: tl.constexpr):
    """Of tokens t of a row; behind its end that of its last token, and before its start none."""
    if DOCUMENTS:
        inside = tl.load(document + row * length + tl.maximum(tl.minimum(t, length - 1), 0))
        return tl.where(t < 0, -1, inside)
    return t * 0


@triton.jit
def states(
    x, delta, log, B, document, state, before, after,
    length, chunks, heads, of_group, x_row, x_token, B_row, B_token,
    DOCUMENTS: tl.constexpr, STATE: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A head's state before each chunk and after the last one, for a block of N; with STATE the first one is given."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    q, p, n = tl.arange(0, Q), tl.arange(0, P), block * BLOCK_N + tl.arange(0, BLOCK_N)
    at_PN = ((row * heads + head) * P + p[:, None]) * N + n[None, :]
    state_PN = tl.load(state + at_PN) if STATE else tl.zeros([P, BLOCK_N], tl.float32)
    for chunk in range(chunks):
        t = chunk * Q + q
        there, end = t < length, tl.max(t, 0)
        at = ((row * chunks + chunk) * heads + head) * P * N
        tl.store(before + at + p[:, None] * N + n[None, :], state_PN.to(before.dtype.element_ty))
        x_QP = tl.load(x + row * x_row + t[:, None] * x_token + head * P + p[None, :], mask=there[:, None], other=0.0)
        B_QN = tl.load(
            B + row * B_row + t[:, None] * B_token + (head // of_group) * N + n[None, :], mask=there[:, None], other=0.0
        )
        delta_Q = tl.load(delta + (row * length + t) * heads + head, mask=there, other=0.0)
        log_Q = tl.load(log + (row * chunks * Q + t) * heads + head)
        total = tl.load(log + (row * chunks * Q + end) * heads + head)
        last = _document(document, row, end, length, DOCUMENTS)
        previous = _document(document, row, tl.min(t, 0) - 1, length, DOCUMENTS)
        same_Q = _document(document, row, t, length, DOCUMENTS) == last
        remains_Q = tl.where(same_Q, delta_Q * tl.exp(total - log_Q), 0.0)
        added_PN = _dot(tl.trans((x_QP.to(tl.float32) * remains_Q[:, None]).to(x_QP.dtype)), B_QN)
        state_PN = state_PN * tl.where(previous == last, tl.exp(total), 0.0) + added_PN
    tl.store(after + at_PN, state_PN)


@triton.jit
def outputs(
    x, delta, log, B, C, document, before, y,
    length, chunks, heads, of_group, x_row, x_token, B_row, B_token, C_row, C_token,
    DOCUMENTS: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A head's y of one chunk."""
    chunk, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    q, p, n = tl.arange(0, Q), tl.arange(0, P), tl.arange(0, N)
    t, group = chunk * Q + q, head // of_group
    there = t < length
    x_QP = tl.load(x + row * x_row + t[:, None] * x_token + head * P + p[None, :], mask=there[:, None], other=0.0)
    B_QN = tl.load(B + row * B_row + t[:, None] * B_token + group * N + n[None, :], mask=there[:, None], other=0.0)
    C_QN = tl.load(C + row * C_row + t[:, None] * C_token + group * N + n[None, :], mask=there[:, None], other=0.0)
    delta_Q = tl.load(delta + (row * length + t) * heads + head, mask=there, other=0.0)
    log_Q = tl.load(log + (row * chunks * Q + t) * heads + head)
    document_Q = _document(document, row, t, length, DOCUMENTS)
    sees_QQ = (q[:, None] >= q[None, :]) & (document_Q[:, None] == document_Q[None, :])
    decay_QQ = tl.exp(tl.where(sees_QQ, log_Q[:, None] - log_Q[None, :], float("-inf")))
    weight_QQ = (_dot(C_QN, tl.trans(B_QN)) * decay_QQ).to(x_QP.dtype)
    y_QP = _dot(weight_QQ, (x_QP.to(tl.float32) * delta_Q[:, None]).to(x_QP.dtype))
    at = ((row * chunks + chunk) * heads + head) * P * N
    state_PN = tl.load(before + at + p[:, None] * N + n[None, :])
    reads_Q = tl.where(document_Q == _document(document, row, tl.min(t, 0) - 1, length, DOCUMENTS), tl.exp(log_Q), 0.0)
    y_QP += reads_Q[:, None] * _dot(C_QN, tl.trans(state_PN))
    at_QP = ((row * length + t[:, None]) * heads + head) * P + p[None, :]
    tl.store(y + at_QP, y_QP.to(y.dtype.element_ty), mask=there[:, None])


@triton.jit
def state_gradients(
    dy, log, C, document, before, dafter, dtotal,
    length, chunks, heads, of_group, C_row, C_token,
    DOCUMENTS: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradients of a head's state after each chunk and of each chunk's last `log`, for a block of N."""
    block, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    q, p, n = tl.arange(0, Q), tl.arange(0, P), block * BLOCK_N + tl.arange(0, BLOCK_N)
    gradient_PN = tl.zeros([P, BLOCK_N], tl.float32)
    for back in range(chunks):
        chunk = chunks - 1 - back
        t = chunk * Q + q
        there, end = t < length, tl.max(t, 0)
        number = (row * chunks + chunk) * heads + head
        tl.store(dafter + number * P * N + p[:, None] * N + n[None, :], gradient_PN.to(dafter.dtype.element_ty))
        of_next = before + (number + heads) * P * N + p[:, None] * N + n[None, :]
        next_PN = tl.load(of_next, mask=(n[None, :] >= 0) & (back > 0), other=0.0).to(tl.float32)
        tl.store(dtotal + number * tl.num_programs(0) + block, tl.sum(next_PN * gradient_PN))
        dy_QP = tl.load(
            dy + ((row * length + t[:, None]) * heads + head) * P + p[None, :], mask=there[:, None], other=0.0
        )
        C_QN = tl.load(
            C + row * C_row + t[:, None] * C_token + (head // of_group) * N + n[None, :], mask=there[:, None], other=0.0
        )
        log_Q = tl.load(log + (row * chunks * Q + t) * heads + head)
        total = tl.load(log + (row * chunks * Q + end) * heads + head)
        last = _document(document, row, end, length, DOCUMENTS)
        previous = _document(document, row, tl.min(t, 0) - 1, length, DOCUMENTS)
        reads_Q = tl.where(_document(document, row, t, length, DOCUMENTS) == previous, tl.exp(log_Q), 0.0)
        added_PN = _dot(tl.trans((dy_QP.to(tl.float32) * reads_Q[:, None]).to(dy_QP.dtype)), C_QN)
        gradient_PN = gradient_PN * tl.where(previous == last, tl.exp(total), 0.0) + added_PN


@triton.jit
def gradients(
    dy, x, delta, log, B, C, document, before, dafter, dx, ddelta, dlog, dB, dC,
    length, chunks, heads, of_group, x_row, x_token, B_row, B_token, C_row, C_token,
    DOCUMENTS: tl.constexpr, Q: tl.constexpr, P: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """All other gradients of one chunk and HEADS heads of a group, over which those of B and C are summed."""
    chunk, block, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    q, p, n = tl.arange(0, Q), tl.arange(0, P), tl.arange(0, N)
    t, group = chunk * Q + q, block * HEADS // of_group
    there, end = t < length, tl.max(t, 0)
    B_QN = tl.load(B + row * B_row + t[:, None] * B_token + group * N + n[None, :], mask=there[:, None], other=0.0)
    C_QN = tl.load(C + row * C_row + t[:, None] * C_token + group * N + n[None, :], mask=there[:, None], other=0.0)
    product_QQ = _dot(C_QN, tl.trans(B_QN))
    document_Q = _document(document, row, t, length, DOCUMENTS)
    sees_QQ = (q[:, None] >= q[None, :]) & (document_Q[:, None] == document_Q[None, :])
    reads = document_Q == _document(document, row, tl.min(t, 0) - 1, length, DOCUMENTS)
    remains = document_Q == _document(document, row, end, length, DOCUMENTS)
    dB_QN, dC_QN = tl.zeros([Q, N], tl.float32), tl.zeros([Q, N], tl.float32)
    for number in range(HEADS):
        head = block * HEADS + number
        at_QP = ((row * length + t[:, None]) * heads + head) * P + p[None, :]
        dy_QP = tl.load(dy + at_QP, mask=there[:, None], other=0.0)
        x_QP = tl.load(x + row * x_row + t[:, None] * x_token + head * P + p[None, :], mask=there[:, None], other=0.0)
        delta_Q = tl.load(delta + (row * length + t) * heads + head, mask=there, other=0.0)
        log_Q = tl.load(log + (row * chunks * Q + t) * heads + head)
        total = tl.load(log + (row * chunks * Q + end) * heads + head)
        at = ((row * chunks + chunk) * heads + head) * P * N + p[:, None] * N + n[None, :]
        input_QP = (x_QP.to(tl.float32) * delta_Q[:, None]).to(x_QP.dtype)
        # Within the chunk.
        decay_QQ = tl.exp(tl.where(sees_QQ, log_Q[:, None] - log_Q[None, :], float("-inf")))
        dproduct_QQ = _dot(dy_QP, tl.trans(input_QP)) * decay_QQ
        moved_QQ = dproduct_QQ * product_QQ
        dlog_Q = tl.sum(moved_QQ, 1) - tl.sum(moved_QQ, 0)
        dinput_QP = _dot(tl.trans((product_QQ * decay_QQ).to(dy_QP.dtype)), dy_QP)
        rounded_QQ = dproduct_QQ.to(B_QN.dtype)
        dC_QN += _dot(rounded_QQ, B_QN)
        dB_QN += _dot(tl.trans(rounded_QQ), C_QN)
        # From the state before it, and to the one after it.
        reads_Q = tl.where(reads, tl.exp(log_Q), 0.0)
        read_QN = reads_Q[:, None] * _dot(dy_QP, tl.load(before + at))
        dC_QN += read_QN
        dlog_Q += tl.sum(read_QN * C_QN.to(tl.float32), 1)
        dafter_PN = tl.load(dafter + at)
        remains_Q = tl.where(remains, tl.exp(total - log_Q), 0.0)
        kept_QP = remains_Q[:, None] * _dot(B_QN, tl.trans(dafter_PN))
        dinput_QP += kept_QP
        dlog_Q -= tl.sum(kept_QP * input_QP.to(tl.float32), 1)
        dB_QN += remains_Q[:, None] * _dot(input_QP, dafter_PN)
        tl.store(dx + at_QP, (dinput_QP * delta_Q[:, None]).to(dx.dtype.element_ty), mask=there[:, None])
        ddelta_Q = tl.sum(dinput_QP * x_QP.to(tl.float32), 1)
        tl.store(ddelta + (row * length + t) * heads + head, ddelta_Q, mask=there)
        tl.store(dlog + (row * chunks * Q + t) * heads + head, dlog_Q)
    at_QN = ((row * length + t[:, None]) * tl.num_programs(1) + block) * N + n[None, :]
    tl.store(dB + at_QN, dB_QN, mask=there[:, None])
    tl.store(dC + at_QN, dC_QN, mask=there[:, None])


@triton.jit
def _channels(x, t, length, stride, c, channels):
    """The channels c of a token; 0 outside of the row."""
    end = tl.where((t >= 0) & (t < length), channels, 0)
    return tl.load(x + t.to(tl.int64) * stride + c, mask=c < end, other=0.0).to(tl.float32)


@triton.jit
def _same(x, document, of, DOCUMENTS: tl.constexpr):
    """x where its document is that one, otherwise 0."""
    if DOCUMENTS:
        return tl.where(document == of, x, 0.0)
    return x


@triton.jit
def _convolved(x0, x1, x2, x3, d0, d1, d2, d3, w0, w1, w2, w3, bias, DOCUMENTS: tl.constexpr):
    """A token's sum over itself and the three before it."""
    y = bias + w3 * x0 + w2 * _same(x1, d1, d0, DOCUMENTS)
    return y + w1 * _same(x2, d2, d0, DOCUMENTS) + w0 * _same(x3, d3, d0, DOCUMENTS)


@triton.jit
def _store_silu(y, pre, t, length, c, channels):
    end = tl.where(t < length, channels, 0)
    tl.store(y + t.to(tl.int64) * channels + c, (pre * tl.sigmoid(pre)).to(y.dtype.element_ty), mask=c < end)


@triton.jit
def convolution(
    x, weight, bias, document, y, length, channels, x_row, x_token,
    DOCUMENTS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """SiLU of the convolution of width 4, of a block of channels of TOKENS tokens."""
    c, row = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.program_id(2).to(tl.int64)
    start, real = tl.program_id(1) * TOKENS, c < channels
    w0, w1 = tl.load(weight + c * 4, mask=real, other=0.0), tl.load(weight + c * 4 + 1, mask=real, other=0.0)
    w2, w3 = tl.load(weight + c * 4 + 2, mask=real, other=0.0), tl.load(weight + c * 4 + 3, mask=real, other=0.0)
    b = tl.load(bias + c, mask=real, other=0.0)
    x, y = x + row * x_row, y + row * length * channels
    x1 = _channels(x, start - 1, length, x_token, c, channels)
    x2 = _channels(x, start - 2, length, x_token, c, channels)
    x3 = _channels(x, start - 3, length, x_token, c, channels)
    d1 = _document(document, row, start - 1, length, DOCUMENTS)
    d2 = _document(document, row, start - 2, length, DOCUMENTS)
    d3 = _document(document, row, start - 3, length, DOCUMENTS)
    for step in range(0, TOKENS, 4):
        t = start + step
        xa = _channels(x, t, length, x_token, c, channels)
        xb = _channels(x, t + 1, length, x_token, c, channels)
        xc = _channels(x, t + 2, length, x_token, c, channels)
        xd = _channels(x, t + 3, length, x_token, c, channels)
        da = _document(document, row, t, length, DOCUMENTS)
        db = _document(document, row, t + 1, length, DOCUMENTS)
        dc = _document(document, row, t + 2, length, DOCUMENTS)
        dd = _document(document, row, t + 3, length, DOCUMENTS)
        pre = _convolved(xa, x1, x2, x3, da, d1, d2, d3, w0, w1, w2, w3, b, DOCUMENTS)
        _store_silu(y, pre, t, length, c, channels)
        pre = _convolved(xb, xa, x1, x2, db, da, d1, d2, w0, w1, w2, w3, b, DOCUMENTS)
        _store_silu(y, pre, t + 1, length, c, channels)
        pre = _convolved(xc, xb, xa, x1, dc, db, da, d1, w0, w1, w2, w3, b, DOCUMENTS)
        _store_silu(y, pre, t + 2, length, c, channels)
        pre = _convolved(xd, xc, xb, xa, dd, dc, db, da, w0, w1, w2, w3, b, DOCUMENTS)
        _store_silu(y, pre, t + 3, length, c, channels)
        x1, x2, x3, d1, d2, d3 = xd, xc, xb, dd, dc, db


@triton.jit
def _slope(dy, pre):
    """The gradient before SiLU."""
    gate = tl.sigmoid(pre)
    return dy * gate * (1.0 + pre * (1.0 - gate))


@triton.jit
def _store_gradient(
    dx, t, first, stop, p0, p1, p2, p3, d0, d1, d2, d3, w0, w1, w2, w3, c, channels, DOCUMENTS: tl.constexpr
):
    """The gradient of token t - 3, of those before SiLU of the three behind it and its own, if this program has it."""
    back = t - 3
    end = tl.where((back >= first) & (back < stop), channels, 0)
    g = w3 * p3 + w2 * _same(p2, d2, d3, DOCUMENTS)
    g += w1 * _same(p1, d1, d3, DOCUMENTS) + w0 * _same(p0, d0, d3, DOCUMENTS)
    tl.store(dx + back.to(tl.int64) * channels + c, g.to(dx.dtype.element_ty), mask=c < end)


@triton.jit
def _add_weights(g0, g1, g2, g3, gb, p, x0, x1, x2, x3, d0, d1, d2, d3, DOCUMENTS: tl.constexpr):
    g3 += p * x0
    g2 += p * _same(x1, d1, d0, DOCUMENTS)
    g1 += p * _same(x2, d2, d0, DOCUMENTS)
    g0 += p * _same(x3, d3, d0, DOCUMENTS)
    return g0, g1, g2, g3, gb + p


@triton.jit
def convolution_gradients(
    dy, x, weight, bias, document, dx, partial, length, channels, x_row, x_token,
    DOCUMENTS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Of the same, and the part of TOKENS tokens of the gradients of weights and bias.

    Gradients before SiLU of the three tokens behind are computed here too; the last of each four tokens that are begun
    behind the end has no use.
    """
    c, row = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C), tl.program_id(2).to(tl.int64)
    start, real = tl.program_id(1) * TOKENS, c < channels
    w0, w1 = tl.load(weight + c * 4, mask=real, other=0.0), tl.load(weight + c * 4 + 1, mask=real, other=0.0)
    w2, w3 = tl.load(weight + c * 4 + 2, mask=real, other=0.0), tl.load(weight + c * 4 + 3, mask=real, other=0.0)
    b = tl.load(bias + c, mask=real, other=0.0)
    x, dy, dx = x + row * x_row, dy + row * length * channels, dx + row * length * channels
    stop = tl.minimum(start + TOKENS, length)
    x1 = _channels(x, start - 1, length, x_token, c, channels)
    x2 = _channels(x, start - 2, length, x_token, c, channels)
    x3 = _channels(x, start - 3, length, x_token, c, channels)
    d1 = _document(document, row, start - 1, length, DOCUMENTS)
    d2 = _document(document, row, start - 2, length, DOCUMENTS)
    d3 = _document(document, row, start - 3, length, DOCUMENTS)
    none = tl.zeros([BLOCK_C], tl.float32)
    p1, p2, p3 = none, none, none
    g0, g1, g2, g3, gb = none, none, none, none, none
    for step in range(0, TOKENS + 4, 4):
        t = start + step
        xa = _channels(x, t, length, x_token, c, channels)
        xb = _channels(x, t + 1, length, x_token, c, channels)
        xc = _channels(x, t + 2, length, x_token, c, channels)
        xd = _channels(x, t + 3, length, x_token, c, channels)
        pa = _channels(dy, t, length, channels, c, channels)
        pb = _channels(dy, t + 1, length, channels, c, channels)
        pc = _channels(dy, t + 2, length, channels, c, channels)
        pd = _channels(dy, t + 3, length, channels, c, channels)
        da = _document(document, row, t, length, DOCUMENTS)
        db = _document(document, row, t + 1, length, DOCUMENTS)
        dc = _document(document, row, t + 2, length, DOCUMENTS)
        dd = _document(document, row, t + 3, length, DOCUMENTS)
        pa = _slope(pa, _convolved(xa, x1, x2, x3, da, d1, d2, d3, w0, w1, w2, w3, b, DOCUMENTS))
        pb = _slope(pb, _convolved(xb, xa, x1, x2, db, da, d1, d2, w0, w1, w2, w3, b, DOCUMENTS))
        pc = _slope(pc, _convolved(xc, xb, xa, x1, dc, db, da, d1, w0, w1, w2, w3, b, DOCUMENTS))
        pd = _slope(pd, _convolved(xd, xc, xb, xa, dd, dc, db, da, w0, w1, w2, w3, b, DOCUMENTS))
        _store_gradient(dx, t, start, stop, pa, p1, p2, p3, da, d1, d2, d3, w0, w1, w2, w3, c, channels, DOCUMENTS)
        _store_gradient(dx, t + 1, start, stop, pb, pa, p1, p2, db, da, d1, d2, w0, w1, w2, w3, c, channels, DOCUMENTS)
        _store_gradient(dx, t + 2, start, stop, pc, pb, pa, p1, dc, db, da, d1, w0, w1, w2, w3, c, channels, DOCUMENTS)
        _store_gradient(dx, t + 3, start, stop, pd, pc, pb, pa, dd, dc, db, da, w0, w1, w2, w3, c, channels, DOCUMENTS)
        if step < TOKENS:
            g0, g1, g2, g3, gb = _add_weights(g0, g1, g2, g3, gb, pa, xa, x1, x2, x3, da, d1, d2, d3, DOCUMENTS)
            g0, g1, g2, g3, gb = _add_weights(g0, g1, g2, g3, gb, pb, xb, xa, x1, x2, db, da, d1, d2, DOCUMENTS)
            g0, g1, g2, g3, gb = _add_weights(g0, g1, g2, g3, gb, pc, xc, xb, xa, x1, dc, db, da, d1, DOCUMENTS)
            g0, g1, g2, g3, gb = _add_weights(g0, g1, g2, g3, gb, pd, xd, xc, xb, xa, dd, dc, db, da, DOCUMENTS)
        x1, x2, x3, d1, d2, d3, p1, p2, p3 = xd, xc, xb, dd, dc, db, pd, pc, pb
    at = partial + (row * tl.num_programs(1) + tl.program_id(1)) * 5 * channels + c
    tl.store(at, g0, mask=real)
    tl.store(at + channels, g1, mask=real)
    tl.store(at + 2 * channels, g2, mask=real)
    tl.store(at + 3 * channels, g3, mask=real)
    tl.store(at + 4 * channels, gb, mask=real)


@triton.jit
def gated_norm(
    y, x, z, D, weight, out, scale, x_token, z_token, heads, epsilon,
    P: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The norm of one group of a token, and the number by which it multiplies."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    there, c = i < WIDTH, group * WIDTH + i
    y_W = tl.load(y + token * heads * P + c, mask=there, other=0.0).to(tl.float32)
    x_W = tl.load(x + token * x_token + c, mask=there, other=0.0).to(tl.float32)
    z_W = tl.load(z + token * z_token + c, mask=there, other=0.0).to(tl.float32)
    y_W += tl.load(D + c // P, mask=there, other=0.0) * x_W
    gated_W = y_W * z_W * tl.sigmoid(z_W)
    factor = tl.rsqrt(tl.sum(gated_W * gated_W) / WIDTH + epsilon)
    normed_W = gated_W * factor * tl.load(weight + c, mask=there, other=0.0)
    tl.store(out + token * heads * P + c, normed_W.to(out.dtype.element_ty), mask=there)
    tl.store(scale + token * tl.num_programs(1) + group, factor)


@triton.jit
def gated_norm_gradients(
    dout, y, x, z, D, weight, scale, dy, dx, dz, partial, tokens, x_token, z_token, heads,
    P: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Of one group of TOKENS tokens, and their part of the gradients of the weight and, by channels, of D."""
    block, group = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    real, c = i < WIDTH, group * WIDTH + i
    D_W, weight_W = tl.load(D + c // P, mask=real, other=0.0), tl.load(weight + c, mask=real, other=0.0)
    dweight_W, dD_W = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for number in range(TOKENS):
        place = block * TOKENS + number
        there, token = i < tl.where(place < tokens, WIDTH, 0), place.to(tl.int64)
        y_W = tl.load(y + token * heads * P + c, mask=there, other=0.0).to(tl.float32)
        x_W = tl.load(x + token * x_token + c, mask=there, other=0.0).to(tl.float32)
        z_W = tl.load(z + token * z_token + c, mask=there, other=0.0).to(tl.float32)
        dout_W = tl.load(dout + token * heads * P + c, mask=there, other=0.0).to(tl.float32)
        factor = tl.load(scale + token * tl.num_programs(1) + group, mask=place < tokens, other=0.0)
        y_W += D_W * x_W
        gate_W = tl.sigmoid(z_W)
        silu_W = z_W * gate_W
        unit_W = y_W * silu_W * factor
        dweight_W += dout_W * unit_W
        dunit_W = dout_W * weight_W
        dgated_W = factor * (dunit_W - unit_W * (tl.sum(dunit_W * unit_W) / WIDTH))
        dy_W = dgated_W * silu_W
        dz_W = dgated_W * y_W * gate_W * (1.0 + z_W * (1.0 - gate_W))
        dD_W += dy_W * x_W
        at = token * heads * P + c
        tl.store(dy + at, dy_W.to(dy.dtype.element_ty), mask=there)
        tl.store(dx + at, (dy_W * D_W).to(dx.dtype.element_ty), mask=there)
        tl.store(dz + at, dz_W.to(dz.dtype.element_ty), mask=there)
    at = partial + block.to(tl.int64) * 2 * heads * P + c
    tl.store(at, dweight_W, mask=real)
    tl.store(at + heads * P, dD_W, mask=real)
