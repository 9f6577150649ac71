"""Scan, convolution and norm of Mamba-2 by Triton kernels (scan_triton.py), behind the interface of scan.py.

Backward computes the states before each chunk again, so that of a scan only its inputs are kept. Chunks have `CHUNK`
tokens whatever is asked for, which changes the order of sums alone.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.kernels import scan

CHUNK = 64  # tokens of a chunk
BLOCK_N = 128  # of a state, that one program passes from chunk to chunk
HEADS = 8  # of a group, over which one program sums the gradients of B and C
WARPS = {"states": 4, "outputs": 4, "state_gradients": 4, "gradients": 8, "convolution": 2}  # of a program
# Of a program of `outputs` in 16 bits for narrow heads. With 4, ptxas 12.8 (of Triton 3.6 and 3.7) puts wrong high
# words into the places of factors in shared memory on Hopper: wrong sums, or an illegal address. Products of 2 warps
# have no such places, which only those of four warps at once do.
NARROW, NARROW_WARPS = 64, 2
STAGES = {2: 3, 4: 1}  # at most, of a loop's loads, by bytes of an activation; 3 is Triton's default
WIDTHS = (16, 32, 64, 128)  # of heads and of states
TAPS = 4  # of a convolution; one with fewer gets taps of 0
TOKENS = 64  # of a program of the convolution; a multiple of 4
CHANNELS = 256  # of the same
NORMED = 16  # tokens of a program of the norm's gradients
_fitting: dict[tuple[Any, ...], int] = {}  # stages of the kernels that were launched


def missing(device: torch.device, sizes: scan.ScanSizes) -> str:
    """Why these kernels cannot serve mixers of these sizes; empty: they can."""
    if not {*sizes} <= {*WIDTHS}:
        widths = ", ".join(map(str, WIDTHS))
        return f"the Triton kernels are for heads and states of {widths}, not {sizes.head_dim} and {sizes.state_size}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return "" if device.type == "cuda" else "it runs on GPUs only"


def causal_conv(
    x_BSC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor,
    *,
    document_BS: Tensor | None = None,
    before_BKC: Tensor | None = None,
) -> Tensor:
    """See scan.causal_conv, which computes what is wider than TAPS."""
    missing = TAPS - weight_CK.shape[1]
    if missing < 0:
        return scan.causal_conv(x_BSC, weight_CK, bias_C, document_BS=document_BS, before_BKC=before_BKC)
    if before_BKC is not None and document_BS is None:  # those before are of no document
        joined_BTC = torch.cat((before_BKC.to(x_BSC.dtype), x_BSC), 1)
        return causal_conv(joined_BTC, weight_CK, bias_C)[:, before_BKC.shape[1] :]
    weight_CK = F.pad(weight_CK, (missing, 0)) if missing else weight_CK
    document_BS = None if document_BS is None else document_BS.to(torch.int32).contiguous()
    y_BSC: Tensor = _Convolution.apply(x_BSC, weight_CK.float(), bias_C.float(), document_BS)
    return y_BSC


class _Convolution(torch.autograd.Function):
    """SiLU of the sums, of channels that may be a view of more. Gradients of weights are summed in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, document: Tensor | None) -> Tensor:
        x, weight, bias = x if x.stride(-1) == 1 else x.contiguous(), weight.contiguous(), bias.contiguous()
        (rows, length, channels), y = x.shape, torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _kernels().convolution[(-(-channels // CHANNELS), -(-length // TOKENS), rows)](
            x, weight, bias, x if document is None else document, y, length, channels, *x.stride()[:2],
            DOCUMENTS=document is not None, TOKENS=TOKENS, BLOCK_C=CHANNELS, num_warps=WARPS["convolution"],
        )  # fmt: skip
        ctx.save_for_backward(x, weight, bias, document)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, document = ctx.saved_tensors
        (rows, length, channels), dx = x.shape, torch.empty(x.shape, dtype=x.dtype, device=x.device)
        segments = -(-length // TOKENS)
        partial = torch.empty(rows * segments, TAPS + 1, channels, dtype=torch.float32, device=x.device)
        _kernels().convolution_gradients[(-(-channels // CHANNELS), segments, rows)](
            dy.contiguous(), x, weight, bias, x if document is None else document, dx, partial,
            length, channels, *x.stride()[:2],
            DOCUMENTS=document is not None, TOKENS=TOKENS, BLOCK_C=CHANNELS, num_warps=WARPS["convolution"],
        )  # fmt: skip
        sums = partial.sum(0)
        return dx, sums[:TAPS].t(), sums[TAPS], None


def gated_norm(
    y_BSHP: Tensor, x_BSHP: Tensor, z_BSF: Tensor, D_H: Tensor, weight_F: Tensor, *, groups: int, epsilon: float
) -> Tensor:
    """See scan.gated_norm."""
    flat = (part.reshape(-1, z_BSF.shape[-1]) for part in (y_BSHP, x_BSHP, z_BSF))
    out: Tensor = _GatedNorm.apply(*flat, D_H.float(), weight_F.float(), groups, epsilon)
    return out.view(z_BSF.shape)


class _GatedNorm(torch.autograd.Function):
    """Of flat tokens; x and z may be views of more features."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, z: Tensor, D: Tensor, weight: Tensor, groups: int, epsilon: float
    ) -> Tensor:
        y, D, weight = y.contiguous(), D.contiguous(), weight.contiguous()
        x, z = (part if part.stride(-1) == 1 else part.contiguous() for part in (x, z))
        (tokens, features), heads = z.shape, len(D)
        out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        scale = torch.empty(tokens, groups, dtype=torch.float32, device=z.device)
        ctx.sizes = heads, _norm_sizes(features, heads, groups)
        _kernels().gated_norm[(tokens, groups)](
            y, x, z, D, weight, out, scale, x.stride(0), z.stride(0), heads, epsilon, **ctx.sizes[1]
        )
        ctx.save_for_backward(y, x, z, D, weight, scale)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        y, x, z, D, weight, scale = ctx.saved_tensors
        (tokens, features), (heads, sizes) = z.shape, ctx.sizes
        blocks = -(-tokens // NORMED)
        dy, dx, dz = (torch.empty(z.shape, dtype=part.dtype, device=z.device) for part in (y, x, z))
        partial = torch.empty(blocks, 2, features, dtype=torch.float32, device=z.device)
        _kernels().gated_norm_gradients[(blocks, scale.shape[1])](
            dout.contiguous(), y, x, z, D, weight, scale, dy, dx, dz, partial,
            tokens, x.stride(0), z.stride(0), heads, TOKENS=NORMED, **sizes,
        )  # fmt: skip
        dweight, dD = partial.sum(0)
        return dy, dx, dz, dD.view(heads, -1).sum(1), dweight, None, None


def _norm_sizes(features: int, heads: int, groups: int) -> dict[str, int]:
    """Constants of the norm's kernels; a thread has 8 features of a group."""
    width = features // groups
    block = 1 << (width - 1).bit_length()
    return {"P": features // heads, "WIDTH": width, "BLOCK": block, "num_warps": min(16, max(1, block // 256))}


def chunk_scan(
    x_BSHP: Tensor,
    delta_BSH: Tensor,
    A_H: Tensor,
    B_BSGN: Tensor,
    C_BSGN: Tensor,
    *,
    chunk: int,
    document_BS: Tensor | None = None,
    state_BHPN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See scan.chunk_scan, which computes the gradient of a state, and widths that are not in WIDTHS.

    y has the dtype of x; the state after the last token has no gradient.
    """
    of_state = state_BHPN is not None and state_BHPN.requires_grad
    if of_state or x_BSHP.shape[-1] not in WIDTHS or B_BSGN.shape[-1] not in WIDTHS:
        return scan.chunk_scan(
            x_BSHP, delta_BSH, A_H, B_BSGN, C_BSGN, chunk=chunk, document_BS=document_BS, state_BHPN=state_BHPN
        )
    delta_BSH = delta_BSH.float()
    padded_BTH = F.pad(delta_BSH, (0, 0, 0, -delta_BSH.shape[1] % CHUNK))
    log_BcQH = (padded_BTH * A_H.float()).unflatten(1, (-1, CHUNK)).cumsum(2)
    document_BS = None if document_BS is None else document_BS.to(torch.int32).contiguous()
    before_BHPN = None if state_BHPN is None else state_BHPN.float().contiguous()
    y_BSHP, after_BHPN = _Scan.apply(x_BSHP, delta_BSH, log_BcQH, B_BSGN, C_BSGN, document_BS, before_BHPN)
    return y_BSHP, after_BHPN


class _Scan(torch.autograd.Function):
    """(y, the state after the last token) of inputs, steps, their sums within chunks, B and C."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor,
        log: Tensor,
        B: Tensor,
        C: Tensor,
        document: Tensor | None,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        x, B, C = (_by_tokens(part) for part in (x, B, C))
        delta, log = delta.contiguous(), log.contiguous()
        before, after = _states(x, delta, log, B, document, state)
        y = x.new_empty(x.shape)
        (rows, length, heads, width), (groups, size), chunks = x.shape, B.shape[2:], log.shape[1]
        _launch(
            "outputs", (chunks, heads, rows),
            x, delta, log, B, C, log if document is None else document, before, y,
            length, chunks, heads, heads // groups, *x.stride()[:2], *B.stride()[:2], *C.stride()[:2],
            DOCUMENTS=document is not None, Q=CHUNK, P=width, N=size,
        )  # fmt: skip
        ctx.save_for_backward(x, delta, log, B, C, document, state)
        ctx.mark_non_differentiable(after)
        return y, after

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        x, delta, log, B, C, document, state = ctx.saved_tensors
        dy = dy.contiguous()
        (rows, length, heads, width), (groups, size), chunks = x.shape, B.shape[2:], log.shape[1]
        before, _ = _states(x, delta, log, B, document, state)
        dafter, (block_N, blocks), of_group = torch.empty_like(before), _blocks(size), heads // groups
        dtotal = torch.empty(rows, chunks, heads, blocks, dtype=torch.float32, device=x.device)
        documents = log if document is None else document
        _launch(
            "state_gradients", (blocks, heads, rows),
            dy, log, C, documents, before, dafter, dtotal,
            length, chunks, heads, of_group, *C.stride()[:2],
            DOCUMENTS=document is not None, Q=CHUNK, P=width, N=size, BLOCK_N=block_N,
        )  # fmt: skip
        together = next(count for count in range(min(HEADS, of_group), 0, -1) if of_group % count == 0)
        dx, ddelta, dlog = (
            torch.empty(x.shape, dtype=x.dtype, device=x.device),
            torch.empty_like(delta),
            torch.empty_like(log),
        )
        dB, dC = (torch.empty(rows, length, heads // together, size, device=x.device) for _ in range(2))
        _launch(
            "gradients", (chunks, heads // together, rows),
            dy, x, delta, log, B, C, documents, before, dafter, dx, ddelta, dlog, dB, dC,
            length, chunks, heads, of_group, *x.stride()[:2], *B.stride()[:2], *C.stride()[:2],
            DOCUMENTS=document is not None, Q=CHUNK, P=width, N=size, HEADS=together,
        )  # fmt: skip
        dlog[:, :, -1] += dtotal.sum(-1)
        dB, dC = (part.unflatten(2, (groups, -1)).sum(3).to(B.dtype) for part in (dB, dC))
        return dx, ddelta, dlog, dB, dC, None, None


def _states(
    x: Tensor, delta: Tensor, log: Tensor, B: Tensor, document: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Before each chunk [B, c, H, P, N] in the dtype of x, and after the last one [B, H, P, N] in fp32."""
    (rows, length, heads, width), (groups, size), chunks = x.shape, B.shape[2:], log.shape[1]
    before = torch.empty(rows, chunks, heads, width, size, dtype=x.dtype, device=x.device)
    after = torch.empty(rows, heads, width, size, dtype=torch.float32, device=x.device)
    block_N, blocks = _blocks(size)
    _launch(
        "states", (blocks, heads, rows),
        x, delta, log, B, log if document is None else document, log if state is None else state, before, after,
        length, chunks, heads, heads // groups, *x.stride()[:2], *B.stride()[:2],
        DOCUMENTS=document is not None, STATE=state is not None, Q=CHUNK, P=width, N=size, BLOCK_N=block_N,
    )  # fmt: skip
    return before, after


def _launch(name: str, grid: tuple[int, int, int], x: Tensor, *given: Any, **constants: Any) -> None:
    """Launch a kernel, with fewer stages than STAGES if they need more shared memory than the GPU has.

    fp32, whose products run without Tensor Cores, has one stage; three needed 312,832 bytes for heads of 64 features
    with states of 128.

    Raises:
        OutOfResources: one stage does not fit either.
    """
    from triton.runtime import OutOfResources

    is_narrow = name == "outputs" and x.element_size() == 2 and constants["P"] < NARROW
    warps = NARROW_WARPS if is_narrow else WARPS[name]
    key = (name, x.device, x.dtype, *constants.values())
    for stages in range(_fitting.get(key, STAGES[x.element_size()]), 0, -1):
        try:
            getattr(_kernels(), name)[grid](x, *given, **constants, num_warps=warps, num_stages=stages)
        except OutOfResources:
            if stages == 1:
                raise
        else:
            _fitting[key] = stages
            return


def _blocks(size: int) -> tuple[int, int]:
    """Numbers of a state that a program has, and how many programs share a state."""
    return min(BLOCK_N, size), max(1, size // BLOCK_N)


def _by_tokens(part: Tensor) -> Tensor:
    """As it is where the heads of a token lie beside each other, as in a view of all channels."""
    return part if part.stride(-1) == 1 and part.stride(2) == part.shape[-1] else part.contiguous()


@functools.cache
def _kernels() -> Any:
    """Compiled when they are first called."""
    from trainer.kernels import scan_triton

    return scan_triton
