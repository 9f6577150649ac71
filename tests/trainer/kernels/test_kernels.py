"""Every implementation of a small operation against its plain twin, and the plain ones against autograd."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
from torch.nn import functional as F

from tests.helpers.ranks import device_type
from trainer.kernels import gpu, plain, scan
from trainer.kernels.table import PLAIN, choose_kernels

DEVICE = torch.device(device_type())
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
# What a run may be given, beside the plain ones.
CHOSEN = [(choose_kernels(DEVICE, dtype), dtype) for dtype in DTYPES]
WITH_PLAIN = [*CHOSEN, *((PLAIN, dtype) for dtype in DTYPES)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def _draw(*size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def _close(got, expected, dtype) -> None:
    for g, e in zip(got, expected, strict=True):
        assert (g is None) == (e is None)
        if g is not None:
            torch.testing.assert_close(g.double(), e.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def _norm_case(dtype):
    x, branch, dsum, dy = (_draw(7, 16, dtype=dtype, seed=s) for s in range(4))
    weight, bias = 1 + 0.1 * _draw(16, dtype=dtype, seed=4), _draw(16, dtype=dtype, seed=5)
    return x, branch, dsum, dy, weight, bias


def _library_norm(name, x, weight, bias):
    return F.rms_norm(x, (16,), weight, 1e-5) if name == "rms_norm" else F.layer_norm(x, (16,), weight, bias, 1e-5)


@pytest.mark.parametrize("joined", [True, False], ids=["sum", "alone"])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_plain_norms_are_those_of_autograd(name, joined):
    x, branch, dsum, dy, weight, bias = _norm_case(torch.float64)
    branch = branch if joined else None
    total, y, *statistics = getattr(plain, name)(x, branch, weight, bias, 1e-5)
    gradients = getattr(plain, name + "_backward")(dsum, dy, total, weight, *statistics)
    whole = (x + branch if joined else x.clone()).requires_grad_()
    parameters = [p.clone().requires_grad_() for p in (weight, bias)]
    expected = _library_norm(name, whole, *parameters)
    (expected * dy).sum().add((whole * dsum).sum()).backward()
    _close([total, y], [whole, expected], torch.float64)
    _close(gradients, [whole.grad, *(p.grad for p in parameters)], torch.float64)


@pytest.mark.parametrize(("kernels", "dtype"), CHOSEN)
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_norms_equal_their_twins(name, kernels, dtype):
    x, branch, dsum, dy, weight, bias = _norm_case(dtype)
    for added, upstream in ((branch, dsum), (None, None)):
        got = getattr(kernels, name)(x, added, weight, bias, 1e-5)
        expected = getattr(plain, name)(x, added, weight, bias, 1e-5)
        _close(got, expected, dtype)
        backward = [getattr(table, name + "_backward") for table in (kernels, PLAIN)]
        _close(*(run(upstream, dy, expected[0], weight, *expected[2:]) for run in backward), dtype)


def test_plain_swiglu_is_that_of_autograd():
    both, dy = _draw(5, 12, dtype=torch.float64).requires_grad_(), _draw(5, 6, dtype=torch.float64, seed=1)
    gate, up = both.chunk(2, dim=-1)
    expected = F.silu(gate) * up
    expected.backward(dy)
    got = torch.empty_like(both)
    plain.swiglu_backward_(*got.chunk(2, dim=-1), dy, *both.detach().chunk(2, dim=-1))
    _close([plain.swiglu(both.detach()), got], [expected, both.grad], torch.float64)


@pytest.mark.parametrize(("kernels", "dtype"), CHOSEN)
def test_swiglu_equals_its_twin(kernels, dtype):
    both, dy = _draw(5, 12, dtype=dtype), _draw(5, 6, dtype=dtype, seed=1)
    results = []
    for table in (kernels, PLAIN):
        out = torch.empty_like(both)
        table.swiglu_backward_(*out.chunk(2, dim=-1), dy, *both.chunk(2, dim=-1))
        results.append([table.swiglu(both), out])
    _close(*results, dtype)


@pytest.mark.parametrize(("kernels", "dtype"), WITH_PLAIN)
def test_joining_heads_is_the_transpose_of_splitting_them(kernels, dtype):
    """<split(x), y> = <x, join(y)> for every x and y; in fp64 to rounding."""
    x, sizes = _draw(2, 3, 8, 4, dtype=dtype), (4, 2, 2)
    angles = _draw(3, 2, dtype=torch.float64, seed=1)
    table = tuple(t.to(torch.promote_types(dtype, torch.float32)) for t in (angles.cos(), angles.sin()))
    parts = kernels.split_heads(x, *table, 4, 2)
    gradients = tuple(_draw(*part.shape, dtype=dtype, seed=2 + i) for i, part in enumerate(parts))
    joined = torch.empty_like(x)
    kernels.join_heads_(joined.split(sizes, dim=2), gradients, table)
    left = sum((p.double() * g.double()).sum() for p, g in zip(parts, gradients, strict=True))
    torch.testing.assert_close(left, (x.double() * joined.double()).sum(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize(("kernels", "dtype"), WITH_PLAIN)
@pytest.mark.parametrize("real", [9, 6])
def test_the_logits_gradient_is_that_of_cross_entropy(kernels, dtype, real):
    """Columns from `real` on are padding; a label of -1 is held by another rank, and adds its own term there."""
    logits, labels = _draw(5, 9, dtype=dtype), torch.tensor([0, 5, 2, 3, -1], device=DEVICE)
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0], device=DEVICE)
    top, total, label = kernels.logit_statistics(logits, labels, real)
    exact = logits[:, :real].double().requires_grad_()
    log_total = exact.logsumexp(1)
    picked = torch.where(labels >= 0, exact.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1), 0.0)
    ((log_total - picked) * weight).sum().backward()
    _close([total.log() + top, label], [log_total, picked], dtype)
    gradient = logits.clone()
    kernels.logits_to_gradient_(gradient, (total.log() + top), labels, weight, real)
    _close([gradient[:, :real]], [exact.grad], dtype)
    assert not gradient[:, real:].any()


def test_a_rank_of_padding_alone_adds_nothing_to_the_statistics():
    top, total, label = plain.logit_statistics(_draw(3, 4, dtype=torch.float32), torch.full((3,), -1), 0)
    assert top.isneginf().all() and not total.any() and not label.any()


@pytest.mark.parametrize(("kernels", "dtype"), CHOSEN)
def test_statistics_of_norms_are_wide(kernels, dtype):
    """In half precision they would be off by 1 part in 256."""
    x, _, _, _, weight, bias = _norm_case(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    for name in ("rms_norm", "layer_norm"):
        assert {part.dtype for part in getattr(kernels, name)(x, None, weight, bias, 1e-5)[2:]} == {wide}


def test_every_operation_has_a_plain_twin():
    for field in dataclasses.fields(PLAIN):
        if field.name == "chunk_kernel":
            continue  # plain attention takes keys of whole rows
        module = scan if hasattr(scan, field.name) else plain
        assert getattr(PLAIN, field.name) is getattr(module, field.name), field.name


def _grouped_case(dtype, end):
    x_MI, dy_MO = (_draw(12, width, dtype=dtype, seed=width) for width in (16, 24))
    weight_EOI, target_EOI = _draw(4, 24, 16, dtype=dtype, seed=5), _draw(4, 24, 16, dtype=torch.float32, seed=6)
    return x_MI, dy_MO, weight_EOI, target_EOI, torch.tensor(end, dtype=torch.int32, device=DEVICE)


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.mark.skipif(not (DEVICE.type == "cuda" or INTERPRETED), reason="needs a GPU")
@pytest.mark.parametrize("end", [[3, 3, 9, 12], [0, 0, 0, 10], [0, 12, 12, 12], [0, 0, 0, 0], [70, 140, 141, 300]])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16])
def test_the_kernel_adds_gradients_of_experts_in_fp32(end, target):
    dtype = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter multiplies bf16 as integers
    dy_MO, x_MI = _draw(300, 136, dtype=dtype, seed=1), _draw(300, 272, dtype=dtype, seed=2)
    end_E = torch.tensor(end, dtype=torch.int32, device=DEVICE)
    for overwrite in (False, True):
        ours = _draw(4, 136, 272, dtype=target, seed=3)
        twin = ours.float()
        gpu.add_with_triton(ours, dy_MO, x_MI=x_MI, end_E=end_E, overwrite=overwrite)
        plain.add_grouped_product(twin, dy_MO.float(), x_MI=x_MI.float(), end_E=end_E, overwrite=overwrite)
        limit = 1e-4 if target == torch.float32 else 1e-2
        torch.testing.assert_close(ours.float(), twin, rtol=limit, atol=limit)


@pytest.mark.parametrize("end", [[3, 3, 9, 12], [0, 0, 0, 10], [0, 12, 12, 12], [0, 0, 0, 0]])
def test_grouped_products_are_those_of_each_group(end):
    """Of PyTorch, too, which runs them on a CPU; groups without rows, rows without a group, all rows in one group."""
    x_MI, dy_MO, weight_EOI, target_EOI, end_E = _grouped_case(torch.bfloat16, end)
    bounds = [*zip([0, *end], end, strict=False)]
    for module in (plain, gpu):
        y_MO = module.grouped_product(x_MI, weight_EOI, end_E)
        back_MI = module.grouped_product(dy_MO, weight_EOI.transpose(1, 2), end_E)
        added, written = target_EOI.clone(), torch.full_like(target_EOI, 7.0)
        module.add_grouped_product(added, dy_MO, x_MI=x_MI, end_E=end_E)
        module.add_grouped_product(written, dy_MO, x_MI=x_MI, end_E=end_E, overwrite=True)
        for expert, (start, stop) in enumerate(bounds):
            x, dy, weight = x_MI[start:stop].float(), dy_MO[start:stop].float(), weight_EOI[expert].float()
            for got, expected in (
                (y_MO[start:stop], x @ weight.t()),
                (back_MI[start:stop], dy @ weight),
                (written[expert], dy.t() @ x),
                (added[expert] - target_EOI[expert], dy.t() @ x),
            ):
                torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=5e-2)
