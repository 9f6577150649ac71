"""The scan in chunks against the recurrence, token by token, and the convolution before it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainer.kernels import triton_scan
from trainer.kernels.scan import ScanSizes, causal_conv, chunk_scan, gated_norm, scan_step, step_sizes
from trainer.kernels.self_test import differences
from trainer.kernels.table import TRITON

ROWS, HEADS, WIDTH, GROUPS, SIZE = 2, 4, 3, 2, 5


def _inputs(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(length)
    shapes = [(ROWS, length, HEADS, WIDTH), (ROWS, length, HEADS), (HEADS,), *[(ROWS, length, GROUPS, SIZE)] * 2]
    x, delta, A, B, C = (torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    return [x, torch.nn.functional.softplus(delta), -A.exp(), B, C]


def recurrence(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, document: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = exp(D_t A) S_(t-1) + D_t x_t B_t^T, y_t = S_t C_t; 0 before each document."""
    B, C = (part.repeat_interleave(x.shape[2] // B.shape[2], 2) for part in (B, C))
    state, out = x.new_zeros(len(x), *x.shape[2:], B.shape[-1]), []
    for t in range(x.shape[1]):
        if document is not None and t:
            state = state * (document[:, t] == document[:, t - 1])[:, None, None, None]
        added = (delta[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        state = (delta[:, t] * A).exp()[..., None, None] * state + added
        out.append((state * C[:, t, :, None]).sum(-1))
    return torch.stack(out, 1), state


def _same(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], inputs: list[Tensor]) -> None:
    """Values, and gradients of a random combination of them, to 1e-10."""
    draw = torch.Generator().manual_seed(1)
    seeds = [torch.randn(part.shape, generator=draw, dtype=part.dtype) for part in expected]
    gradients = [torch.autograd.grad(parts, inputs, seeds, retain_graph=True) for parts in (got, expected)]
    for a, b in zip((*got, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10 * float(b.detach().abs().max()))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 25])
def test_chunks_are_the_recurrence(length):
    inputs = [part.requires_grad_() for part in _inputs(length)]
    expected = recurrence(*inputs)
    for chunk in (1, 8, 64):
        _same(chunk_scan(*inputs, chunk=chunk), expected, inputs)


@pytest.mark.parametrize("bounds", [(7,), (8,), (9,), (1, 2, 3, 16), (15, 17, 24)])
def test_a_state_restarts_with_each_document(bounds):
    """Bounds beside and on the borders of chunks, and documents shorter than one."""
    inputs = [part.requires_grad_() for part in _inputs(25)]
    document = torch.bucketize(torch.arange(25), torch.tensor(bounds), right=True).expand(ROWS, -1)
    _same(chunk_scan(*inputs, chunk=8, document_BS=document), recurrence(*inputs, document), inputs)


def test_a_scan_goes_on_from_a_state():
    inputs = _inputs(21)
    y, state = chunk_scan(*inputs, chunk=8)
    part, held = chunk_scan(*[x[:, :13] if x.dim() > 1 else x for x in inputs], chunk=8)
    parts = [part]
    for t in range(13, 17):
        x, delta, A, B, C = inputs
        new, held = scan_step(x[:, t], delta[:, t], A, B[:, t], C[:, t], state_BHPN=held)
        parts.append(new[:, None])
    rest, held = chunk_scan(*[x[:, 17:] if x.dim() > 1 else x for x in inputs], chunk=8, state_BHPN=held)
    torch.testing.assert_close(torch.cat([*parts, rest], 1), y, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(held, state, rtol=1e-10, atol=1e-12)


def test_large_steps_forget_without_infinities():
    """Differences of sums above the diagonal would overflow; they are left out before the exponential."""
    x, delta, A, B, C = (part.requires_grad_() for part in _inputs(40, torch.float32))
    y, _ = chunk_scan(x, delta * 1e3, A, B, C, chunk=16)
    gradients = torch.autograd.grad(y.sum(), (x, delta, A, B, C))
    assert y.isfinite().all() and all(part.isfinite().all() for part in gradients)


def test_a_convolution_sees_its_window_and_its_document():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 11, 6, generator=draw, dtype=torch.float64)
    weight, bias = torch.randn(6, 4, generator=draw).double(), torch.randn(6, generator=draw).double()
    expected = torch.conv1d(torch.nn.functional.pad(x.mT, (3, 0)), weight[:, None], bias, groups=6).mT
    torch.testing.assert_close(causal_conv(x, weight, bias), torch.nn.functional.silu(expected))
    later = causal_conv(x[:, 5:], weight, bias, before_BKC=x[:, 2:5])
    torch.testing.assert_close(later, causal_conv(x, weight, bias)[:, 5:])
    bounds = [0, 1, 3, 6, 7, 11]  # some within the window of a token behind them
    document = torch.repeat_interleave(torch.arange(5), torch.tensor(bounds).diff()).expand(ROWS, -1)
    apart = [causal_conv(x[:, a:b], weight, bias) for a, b in itertools.pairwise(bounds)]
    torch.testing.assert_close(causal_conv(x, weight, bias, document_BS=document), torch.cat(apart, 1))


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EDGE = triton_scan.CHUNK
LAYOUTS = {  # length, heads, groups, features of a head, size of a state, first tokens of documents
    "a chunk and one token": (EDGE + 1, 4, 2, 16, 32, None),
    "one token": (1, 2, 1, 16, 16, None),
    "documents at the borders of chunks": (3 * EDGE, 2, 2, 32, 16, (EDGE - 1, EDGE, EDGE + 1, 2 * EDGE)),
    "a document over many chunks": (4 * EDGE + 9, 2, 1, 16, 16, (3, 3 * EDGE + 1)),
    "more heads of a group than are summed at once": (70, 12, 1, 16, 16, (64,)),
    "a published shape": (2 * EDGE, 8, 1, 64, 128, None),
}


@pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU")
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_triton_kernels_are_the_plain_scan(name):
    """In fp32, whose products are not rounded; a bf16 trial runs on a GPU before they are used."""
    length, heads, groups, width, size, bounds = LAYOUTS[name]
    draw, device = torch.Generator().manual_seed(length), torch.device("cpu" if INTERPRETED else "cuda")
    sizes, counts = [heads * width, groups * size, groups * size], (heads, groups, groups)
    channels = torch.randn(ROWS, length, sum(sizes), generator=draw)
    delta, A = torch.rand(ROWS, length, heads, generator=draw), -torch.rand(heads, generator=draw)
    dy = torch.randn(ROWS, length, heads, width, generator=draw)
    document = None
    if bounds is not None:
        document = torch.bucketize(torch.arange(length), torch.tensor(bounds), right=True).expand(ROWS, -1).to(device)
    results = []
    for scan, dtype in ((chunk_scan, torch.float64), (triton_scan.chunk_scan, torch.float32)):
        inputs = [part.to(device, dtype).requires_grad_() for part in (channels, delta, A)]
        parts = [part.unflatten(-1, (n, -1)) for part, n in zip(inputs[0].split(sizes, -1), counts, strict=True)]
        y, state = scan(parts[0], *inputs[1:], *parts[1:], chunk=EDGE, document_BS=document)
        results.append((y.detach(), state.detach(), *torch.autograd.grad(y, inputs, dy.to(device, dtype))))
    for found, right in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=2e-5 * float(right.abs().max()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "size"), itertools.product(triton_scan.WIDTHS, repeat=2))
def test_the_triton_kernels_are_the_plain_scan_in_sixteen_bits(width, size, dtype):
    """In every size: a compiler's fault may lie in some alone."""
    assert differences("scan", TRITON, device=torch.device("cuda"), dtype=dtype, sizes=ScanSizes(width, size)) == ""


@pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU")
@pytest.mark.parametrize("length", [1, EDGE, 2 * EDGE + 3])
def test_the_triton_kernels_go_on_from_a_state_as_the_plain_scan(length):
    """Results, gradients, and two pieces that equal the whole."""
    draw, device = torch.Generator().manual_seed(length), torch.device("cpu" if INTERPRETED else "cuda")
    rows = ROWS, length
    shapes = (*rows, 4, 16), (*rows, 4), (4,), (*rows, 2, 32), (*rows, 2, 32), (ROWS, 4, 16, 32), (*rows, 4, 16)
    *inputs, state, dy = (torch.randn(*shape, generator=draw) for shape in shapes)
    inputs[1:3] = inputs[1].sigmoid(), -inputs[2].exp()
    results = []
    for scan, dtype in ((chunk_scan, torch.float64), (triton_scan.chunk_scan, torch.float32)):
        given = [part.to(device, dtype).requires_grad_() for part in inputs]
        y, after = scan(*given, chunk=EDGE, state_BHPN=state.to(device, dtype))
        results.append((y.detach(), after.detach(), *torch.autograd.grad(y, given, dy.to(device, dtype))))
        x, delta, A, B, C = (part.detach() for part in given)
        pieces, at = [], state.to(device, dtype)
        for piece in (slice(0, length // 3), slice(length // 3, length)):
            if piece.stop > piece.start:
                of_piece = (part[:, piece] for part in (B, C))
                y, at = scan(x[:, piece], delta[:, piece], A, *of_piece, chunk=EDGE, state_BHPN=at)
                pieces.append(y)
        results[-1] += torch.cat(pieces, 1), at
    for found, right in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=2e-5 * float(right.abs().max()))


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled")
@pytest.mark.parametrize(
    ("capability", "memory", "dtype", "width", "size"),
    [
        (90, 232_448, torch.float32, 64, 128),
        (90, 232_448, torch.bfloat16, 128, 128),
        (89, 101_376, torch.bfloat16, 64, 128),
    ],
)
def test_the_triton_kernels_fit_the_shared_memory_of_a_gpu(capability, memory, dtype, width, size, monkeypatch):
    """Compiled for it and not launched, so that any machine with Triton can tell."""
    runtime, target = pytest.importorskip("triton.runtime"), pytest.importorskip("triton.backends.compiler").GPUTarget
    used = dict[str, int]()

    class Driver:
        def get_current_target(self):
            return target("cuda", capability, 32)

        def get_current_device(self):
            return f"sm_{capability}"  # a key of compiled kernels, apart from those of a real GPU

        def get_current_stream(self, _):
            return 0

    def compiled(kernel, *given, grid, warmup, **constants):
        needed = run(kernel, *given, grid=grid, warmup=True, **constants).metadata.shared
        if needed > memory:
            raise runtime.OutOfResources(needed, memory, "shared memory")
        used[kernel.__name__] = needed

    run = runtime.JITFunction.run
    monkeypatch.setattr(runtime.JITFunction, "run", compiled)
    monkeypatch.setattr(triton_scan, "_fitting", {})
    shapes = (1, EDGE, 8, width), (1, EDGE, 8), (8,), (1, EDGE, 1, size), (1, EDGE, 1, size)
    inputs = [torch.zeros(*shape, dtype=torch.float32 if len(shape) < 4 else dtype) for shape in shapes]
    inputs = [part.requires_grad_() for part in inputs]
    real = runtime.driver.active if torch.cuda.is_available() else None
    runtime.driver.set_active(Driver())
    try:
        triton_scan.chunk_scan(*inputs, chunk=EDGE)[0].sum().backward()
    finally:
        runtime.driver.set_active(real)
    assert set(used) == {"states", "outputs", "state_gradients", "gradients"} and max(used.values()) > 0


CONVOLUTIONS = {  # length, channels, width, first tokens of documents
    "one token": (1, 5, 4, None),
    "segments": (2 * triton_scan.TOKENS + 2, 300, 4, None),
    "a segment": (triton_scan.TOKENS, 8, 3, None),
    "documents": (triton_scan.TOKENS + 9, 8, 4, (1, 2, 5, 62, 63, 64, 66)),
    "documents, two taps": (2 * triton_scan.TOKENS, 8, 2, (triton_scan.TOKENS,)),
}


@pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU")
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_triton_kernels_are_the_plain_convolution(name):
    """Of a view of more channels; bounds on and beside the borders of segments."""
    length, channels, width, bounds = CONVOLUTIONS[name]
    draw, device = torch.Generator().manual_seed(length), torch.device("cpu" if INTERPRETED else "cuda")
    shapes = (ROWS, length, channels + 3), (channels, width), (channels,), (ROWS, length, channels)
    *drawn, dy = (torch.randn(*shape, generator=draw) for shape in shapes)
    document = None
    if bounds is not None:
        document = torch.bucketize(torch.arange(length), torch.tensor(bounds), right=True).expand(ROWS, -1).to(device)
    results = []
    for convolve, dtype in ((causal_conv, torch.float64), (triton_scan.causal_conv, torch.float32)):
        inputs = [part.to(device, dtype).requires_grad_() for part in drawn]
        y = convolve(inputs[0][..., 2:-1], *inputs[1:], document_BS=document)
        before = convolve(y.detach(), *inputs[1:], before_BKC=y.detach()[:, -1:].expand(-1, width - 1, -1))
        results.append((y.detach(), before.detach(), *torch.autograd.grad(y, inputs, dy.to(device, dtype))))
    for got, right in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=2e-5 * float(right.abs().max()))


@pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU")
@pytest.mark.parametrize(("tokens", "heads", "groups"), [(triton_scan.NORMED + 1, 6, 2), (3, 4, 1)])
def test_the_triton_kernels_are_the_plain_gated_norm(tokens, heads, groups):
    """Of views of more features, with a width of a group that is no power of 2."""
    draw, device = torch.Generator().manual_seed(tokens), torch.device("cpu" if INTERPRETED else "cuda")
    shapes = (ROWS, tokens, heads, 8), (ROWS, tokens, 9 * heads), (ROWS, tokens, 9 * heads), (heads,), (8 * heads,)
    drawn = [torch.randn(*shape, generator=draw) for shape in (*shapes, (ROWS, tokens, 8 * heads))]
    results = []
    for norm, dtype in ((gated_norm, torch.float64), (triton_scan.gated_norm, torch.float32)):
        *inputs, dy = (part.to(device, dtype).requires_grad_() for part in drawn)
        y, x, z, *weights = inputs
        x, z = x[..., : 8 * heads].unflatten(-1, (heads, -1)), z[..., heads:]
        normed = norm(y, x, z, *weights, groups=groups, epsilon=1e-5)
        results.append((normed.detach(), *torch.autograd.grad(normed, inputs, dy.detach())))
    for got, right in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=2e-5 * float(right.abs().max()))


@pytest.mark.parametrize("documents", [False, True])
def test_compiled_parts_of_a_mixer_are_the_plain_ones(documents):
    """Convolution, steps, gate and norm, with gradients; each is one graph, as a GPU compiles it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    draw = torch.Generator().manual_seed(1)
    sizes, of_groups = [HEADS * WIDTH, HEADS * WIDTH + 2 * GROUPS * SIZE, HEADS], GROUPS * SIZE
    shapes = [(ROWS, 9, sum(sizes)), (sizes[1], 4), (sizes[1],), (HEADS,), (HEADS,), (sizes[0],)]
    inputs = [torch.randn(*shape, generator=draw).to(device).requires_grad_() for shape in shapes]
    document = (torch.arange(9, device=device) // 4).expand(ROWS, -1) if documents else None

    def mixed(*functions: Callable[..., Tensor]) -> Tensor:
        conv, steps, norm = functions
        z, xBC, dt = inputs[0].bfloat16().split(sizes, -1)
        x, B, C = conv(xBC, *inputs[1:3], document_BS=document).split([sizes[0], of_groups, of_groups], -1)
        x = x.unflatten(-1, (HEADS, -1))
        y = x.float() * steps(dt, inputs[3], (0.0, 0.8))[..., None] + (B * C).float().sum()
        out: Tensor = norm(y, x, z, *inputs[4:], groups=GROUPS, epsilon=1e-5)
        return out

    plain = causal_conv, step_sizes, gated_norm
    expected, got = mixed(*plain), mixed(*(torch.compile(f, backend=backend, fullgraph=True) for f in plain))
    seed = torch.randn(expected.shape, generator=draw).to(expected)
    parts = [(result, *torch.autograd.grad(result, inputs, seed)) for result in (got, expected)]
    for a, b in zip(*parts, strict=True):
        assert float((a - b).detach().norm()) <= 1e-2 * float(b.detach().norm())
