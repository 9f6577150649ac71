"""Compares kernels of other libraries with the plain ones on small inputs, forward and backward, when a run starts.

A library may be built for another version of PyTorch, of CUDA or of itself, and then compute wrong numbers without an
error. A result passes if ||found - plain|| <= tolerance ||plain||, with the plain one computed in fp32. Kernels from
torch.compile are not tested here: they are compiled for the shapes of their first call, and small shapes would make
them slower for those of the run. table.py, which makes the choice, is read without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mdata import UsageError
from trainer.kernels import plain, scan
from trainer.kernels.float8 import (
    BLOCK,
    E4M3,
    E5M2,
    Float8,
    Operand,
    Scaling,
    float8_product,
    float8_quantize,
    float8_rows,
    float8_rows_grouped_product,
    float8_rows_product,
)
from trainer.kernels.plain import AdamConstants, AdamState
from trainer.kernels.scan import ScanSizes

# Tolerance of a result in that dtype: a few roundings to 8, 11 or 24 bits.
TOLERANCES = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
TOKENS, WIDTH, HEADS, GROUPS, HEAD, LENGTH = 64, 256, 4, 2, 64, 129
SCAN = ScanSizes(head_dim=64, state_size=32)
# Of 2 heads of 16 x 32 the decays have gradients so near 0 that rounding to fp16 is 3.5 times the tolerance.
SCAN_HEADS = 16
Results = Iterator[tuple[str, Tensor]]


def differences(group: str, kernels: Any, *, device: torch.device, dtype: torch.dtype, sizes: ScanSizes = SCAN) -> str:
    """How the operations of one key of [kernels] differ from the plain ones; empty: within the tolerance.

    Args:
        sizes: the model's, with which a scan is tried; a GPU may lack the shared memory that they need.

    Raises:
        UsageError: one of them left the GPU in a state in which this process cannot use it.
    """
    example = functools.partial(_scan, sizes=sizes) if group == "scan" else EXAMPLES[group]
    results = _computed(lambda: example(kernels, _draws(device), dtype), group, device)
    if isinstance(results, str):
        return results
    expected = example(plain, _draws(device), torch.float32)
    for (name, actual), (_, right) in zip(results, expected, strict=True):
        if problem := _difference(name, actual, right, tolerance=TOLERANCES[dtype]):
            return problem
    return ""


def _computed(example: Callable[[], Results], group: str, device: torch.device) -> list[tuple[str, Tensor]] | str:
    """The results of an example; or why there are none."""
    failures: tuple[type[Exception], ...]
    failures = (*refusals(), TypeError, ValueError, AttributeError, ImportError, AssertionError)
    try:
        results = list(example())
        _wait(device)
    except failures as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        try:
            _wait(device)
        except RuntimeError:
            way_out = f'set kernels.{group}="plain"' if group in EXAMPLES else "train and generate without FP8"
            raise UsageError(
                f"a kernel that was tried for {group} left the GPU unusable to this process ({reason})", fix=way_out
            ) from error
        return f"its self-test failed: {reason}"
    return results


def _wait(device: torch.device) -> None:
    """For what was launched, so that it fails here if it fails."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@functools.cache
def refusals() -> tuple[type[Exception], ...]:
    """What a kernel raises that does not fit a GPU or that its compiler cannot build: of torch, and of Triton."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return (RuntimeError,)
    return RuntimeError, TritonError


def _difference(name: str, result: Tensor, expected: Tensor, *, tolerance: float) -> str:
    error = float((result.double() - expected.double()).norm() / expected.double().norm())
    if error <= tolerance:  # not so for NaN
        return ""
    return f"its self-test failed: {name} differs from the plain kernel's by {error:.2g}, and {tolerance:g} is allowed"


def _draws(device: torch.device) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(1)
    # Values that bf16 can hold, so that all dtypes start from the same ones.
    return lambda *size: torch.randn(*size, generator=generator).bfloat16().to(device)


def _norm(kernels: Any, draw: Callable[..., Tensor], dtype: torch.dtype) -> Results:
    x, branch, dsum, dy = (draw(TOKENS, WIDTH).to(dtype) for _ in range(4))
    weight, bias = draw(WIDTH).to(dtype), draw(WIDTH).to(dtype)
    total, y, scale = kernels.rms_norm(x, branch, weight, None, 1e-5)
    yield from (("the sum", total), ("RMSNorm", y), ("its scale", scale))
    for gradient in (dsum.clone(), None):
        dx, dweight, _ = kernels.rms_norm_backward(gradient, dy, total, weight, scale)
        yield from (("RMSNorm's gradient", dx), ("the gradient of RMSNorm's weight", dweight))
    total, y, mean, scale = kernels.layer_norm(x, None, weight, bias, 1e-5)
    yield from (("LayerNorm", y), ("its mean", mean), ("its scale", scale))
    dx, dweight, dbias = kernels.layer_norm_backward(dsum.clone(), dy, total, weight, mean, scale)
    yield from (("LayerNorm's gradient", dx), ("that of its weight", dweight), ("that of its bias", dbias))


def _attention(kernels: Any, draw: Callable[..., Tensor], dtype: torch.dtype) -> Results:
    q = draw(2, LENGTH, HEADS, HEAD).to(dtype).requires_grad_()
    k, v = (draw(2, LENGTH, GROUPS, HEAD).to(dtype).requires_grad_() for _ in range(2))
    dy = draw(2, LENGTH, HEADS, HEAD).to(dtype)
    for scale in (None, 0.2):
        y = kernels.attention(q, k, v, scale)
        yield "attention", y.detach()
        gradients = torch.autograd.grad(y, (q, k, v), dy)
        yield from zip(("the gradient of q", "the gradient of k", "the gradient of v"), gradients, strict=True)


def _optimizer(kernels: Any, draw: Callable[..., Tensor], dtype: torch.dtype) -> Results:
    weight, first, gradient = (draw(1000).float() for _ in range(3))
    second, before = draw(1000).float().square(), weight.clone()
    parameter = weight.to(dtype)
    numbers = torch.tensor([0.5, 1e-2, 1 - 0.9**3, 1 - 0.95**3, 3.0], device=weight.device)
    for applied in (False, True):
        kernels.adamw_(
            AdamState(weight, first, second, parameter),
            gradient.clone(),
            numbers,
            torch.tensor(applied, device=weight.device),
            AdamConstants(0.9, 0.95, 1e-8, 0.1),
        )
        yield "the parameter", parameter.clone()
        yield "AdamW's change of the weight", 1e-9 + (weight - before).double()
        yield from (("the first moment", first.clone()), ("the second moment", second.clone()))


def _weight_gradient(kernels: Any, draw: Callable[..., Tensor], dtype: torch.dtype) -> Results:
    target, dy, x = draw(48, 32).float(), draw(TOKENS, 48).to(dtype), draw(TOKENS, 32).to(dtype)
    kernels.add_product(target, dy, x_NI=x)
    yield "a sum of products", target.clone()
    kernels.add_product(target.fill_(torch.nan), dy, x_NI=x, overwrite=True)
    yield "a product over stale numbers", target


def _scan(kernels: Any, draw: Callable[..., Tensor], dtype: torch.dtype, sizes: ScanSizes = SCAN) -> Results:
    kernels = scan if kernels is plain else kernels
    heads, (width, size) = SCAN_HEADS, sizes
    cuts, counts = [heads * width, GROUPS * size, GROUPS * size], (heads, GROUPS, GROUPS)
    x = draw(2, LENGTH, sum(cuts)).to(dtype).requires_grad_()
    weight, bias = (draw(sum(cuts), 4) / 2).float().requires_grad_(), draw(sum(cuts)).float().requires_grad_()
    delta, A = draw(2, LENGTH, heads).float().sigmoid().requires_grad_(), (-draw(heads).float().exp()).requires_grad_()
    dy = draw(2, LENGTH, heads, width).to(dtype)
    halves = torch.arange(LENGTH, device=x.device).expand(2, -1) // (LENGTH // 2)
    for document in (None, halves):
        parts = kernels.causal_conv(x, weight, bias, document_BS=document).split(cuts, -1)
        inputs, B, C = (part.unflatten(-1, (count, -1)) for part, count in zip(parts, counts, strict=True))
        y, state = kernels.chunk_scan(inputs, delta, A, B, C, chunk=32, document_BS=document)
        yield from (("the scan", y.detach()), ("the state behind it", state.detach()))
        gradients = torch.autograd.grad(y, (x, weight, bias, delta, A), dy.to(y.dtype))
        names = ("the input", "the convolution", "its bias", "steps", "decays")
        yield from ((f"the gradient of {name}", part) for name, part in zip(names, gradients, strict=True))
    with torch.no_grad():  # as in generation
        before = draw(2, heads, width, size).float()
        y, state = kernels.chunk_scan(inputs, delta, A, B, C, chunk=32, state_BHPN=before)
    yield from (("the scan from a state", y), ("the state behind that", state))
    y, x = (draw(2, LENGTH, heads, width).to(dtype).requires_grad_() for _ in range(2))
    z, dy = draw(2, LENGTH, heads * width).to(dtype).requires_grad_(), draw(2, LENGTH, heads * width).to(dtype)
    D, weight = draw(heads).float().requires_grad_(), draw(heads * width).float().requires_grad_()
    normed = kernels.gated_norm(y, x, z, D, weight, groups=GROUPS, epsilon=1e-5)
    yield "the gated norm", normed.detach()
    names = ("its input", "what D multiplies", "its gate", "D", "its weight")
    gradients = torch.autograd.grad(normed, (y, x, z, D, weight), dy)
    yield from ((f"the gradient of {name}", part) for name, part in zip(names, gradients, strict=True))


EXAMPLES: dict[str, Callable[[Any, Callable[..., Tensor], torch.dtype], Results]] = {
    "norm": _norm,
    "attention": _attention,
    "optimizer": _optimizer,
    "weight_gradient": _weight_gradient,
    "scan": _scan,
}


def float8_differences(
    quantize: Callable[..., Any], product: Callable[..., Tensor], *, device: torch.device, blocks: bool = False
) -> str:
    """How FP8 rounding and products differ from the plain ones; empty: no difference.

    Args:
        blocks: whether blocks have scales of their own.
    """
    examples = _float8_blocks if blocks else _float8
    return _float8_differences(examples, (quantize, product), (float8_quantize, float8_product), device)


def float8_rows_differences(
    quantize: Callable[..., Any], product: Callable[..., Tensor], *, device: torch.device
) -> str:
    """The same of matrices with a scale for each row."""
    return _float8_differences(_float8_rows, (quantize, product), (float8_rows, float8_rows_product), device)


def float8_grouped_differences(product: Callable[..., Tensor], *, device: torch.device) -> str:
    """The same of products of experts, one of which has no rows."""
    return _float8_differences(_float8_grouped, (product,), (float8_rows_grouped_product,), device)


def _float8_differences(
    examples: Callable[..., Results], kernels: tuple[Any, ...], plain: tuple[Any, ...], device: torch.device
) -> str:
    results = _computed(lambda: examples(*kernels, _draws(device)), "FP8", device)
    if isinstance(results, str):
        return results
    expected = examples(*plain, _draws(device))
    for (name, actual), (_, right) in zip(results, expected, strict=True):
        # Results are rounded to bf16. Values are equal, except where a scale that differs in its last bit changed one.
        if problem := _difference(name, actual, right, tolerance=2e-3 if "value" in name else 1e-2):
            return problem
    return ""


def _float8_rows(quantize: Callable[..., Any], product: Callable[..., Tensor], draw: Callable[..., Tensor]) -> Results:
    weight = float8_rows(draw(96, 128))
    for tokens in (1, TOKENS):
        x8 = quantize(draw(tokens, 128).bfloat16())
        yield "a rounded value", x8.values_RC.float()
        yield "a scale", x8.inverse_R1
        yield "the product", product(x8, weight, dtype=torch.bfloat16)


def _float8_grouped(product: Callable[..., Tensor], draw: Callable[..., Tensor]) -> Results:
    weights, x = float8_rows(draw(3, 96, 128)), draw(TOKENS, 128).bfloat16()
    ends = torch.tensor([TOKENS // 3, TOKENS // 3, TOKENS], dtype=torch.int32, device=x.device)
    yield "the product of experts", product(x, weights, ends)


def _float8(quantize: Callable[..., Any], product: Callable[..., Tensor], draw: Callable[..., Tensor]) -> Results:
    x, dy, weight = draw(TOKENS, 128), draw(TOKENS, 96), draw(96, 128)
    largest = torch.full((1,), 1.5, device=x.device)
    scale = torch.full((1,), 100.0, device=x.device)  # too large for some values
    x8 = quantize(x, E4M3, scaling=Scaling(scale, largest), columns=True)
    w8 = quantize(weight, E4M3, scaling=Scaling(None, largest), columns=True)
    g8 = quantize(dy, E5M2, scaling=Scaling(None, None), columns=True)
    yield "a largest value", largest
    yield from _float8_results(product, (x8, w8, g8), draw)
    yield from (("a scale", rounded.rows.inverse) for rounded in (x8, w8, g8))


def _float8_blocks(
    quantize: Callable[..., Any], product: Callable[..., Tensor], draw: Callable[..., Tensor]
) -> Results:
    x, dy, weight = draw(2 * BLOCK, 3 * BLOCK), draw(2 * BLOCK, BLOCK), draw(BLOCK, 3 * BLOCK)
    uneven = torch.logspace(-6, 6, 3 * BLOCK, device=x.device)  # so that a wrong scale is far off
    x8 = quantize(x * uneven, E4M3, scaling=Scaling(None, None, "rows"), columns=True)
    w8 = quantize(weight * uneven.flip(0), E4M3, scaling=Scaling(None, None, "squares"), columns=True)
    for dtype in (E4M3, E5M2):
        g8 = quantize(dy, dtype, scaling=Scaling(None, None, "rows"), columns=True)
        yield from _float8_results(product, (x8, w8, g8), draw)


def _float8_results(
    product: Callable[..., Tensor], rounded: tuple[Float8, ...], draw: Callable[..., Tensor]
) -> Results:
    """Values of an input, a weight and a gradient, and the products of a layer."""
    for matrix in rounded:
        yield "a rounded value", matrix.rows.values_RK.float()
        yield "a transposed value", _columns(matrix).values_RK.float()
    x8, w8, g8 = rounded
    outputs, inputs = w8.rows.values_RK.shape
    yield "the product", product(x8.rows, w8.rows, dtype=torch.bfloat16, bias_N=draw(outputs), fast=True)
    yield "the input's gradient", product(g8.rows, _columns(w8), dtype=torch.bfloat16)
    left, right, main = _columns(g8), _columns(x8), draw(outputs, inputs).float()
    yield "the weight's gradient", product(left, right, dtype=torch.float32, out=main, add=True).clone()
    main.fill_(torch.nan)
    yield "the weight's first gradient", product(left, right, dtype=torch.float32, out=main).clone()


def _columns(matrix: Float8) -> Operand:
    assert matrix.columns is not None, "requested above"
    return matrix.columns
