"""Main gradients: what backward adds to them, and that nothing is rounded to half precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainer.kernels.table import PLAIN
from trainer.layers.base import Layer, Parallel, add_few_rows, add_rows
from trainer.layers.embedding import PositionEmbedding
from trainer.layers.linear import Linear, use_one_row_kernel
from trainer.layers.norm import HeadsNorm, Norm
from trainer.layers.shapes import NormShape
from trainer.parallel.collectives import Group

ALONE = Parallel(Group.single("tp"), sequence_parallel=False)
MICROBATCHES, TOKENS, WIDTH = 64, 16, 8


def _draw(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _layer(name: str) -> Layer:
    if name in ("column", "row"):
        layer: Layer = Linear(WIDTH, WIDTH, parallel=ALONE, bias=True, column=name == "column")
    else:
        layer = Norm(WIDTH, NormShape(kind=name, epsilon=1e-5), kernels=PLAIN)
    layer = layer.to(torch.bfloat16)
    for seed, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(_draw(1000 + seed, *parameter.shape))
    return layer


def _exact(name: str, layer: Layer, x: torch.Tensor) -> torch.Tensor:
    weight, bias = layer.weight, layer.bias
    if name in ("column", "row"):
        return F.linear(x, weight, bias)
    return F.rms_norm(x, (WIDTH,), weight, 1e-5) if name == "rmsnorm" else F.layer_norm(x, (WIDTH,), weight, bias, 1e-5)


def _normed(x: torch.Tensor, weight: torch.Tensor, shape: NormShape, *, dims: tuple[int, ...]) -> torch.Tensor:
    """A norm without bias by its definition, for autograd."""
    x = x - x.mean(dims, keepdim=True) if shape.kind == "layernorm" else x
    return x * (x.square().mean(dims, keepdim=True) + shape.epsilon).rsqrt() * (weight + shape.zero_centered)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("over", ["features", "own_head", "all_heads"])
def test_norms_without_bias_are_their_definition(over, kind, zero_centered):
    """Values, and gradients of the input and the weights."""
    shape, heads = NormShape(kind=kind, epsilon=1e-3, bias=False, zero_centered=zero_centered), 3
    if over == "features":
        layer: Norm | HeadsNorm = Norm(WIDTH, shape, kernels=PLAIN)
    else:
        layer = HeadsNorm(heads, WIDTH, shape, tp=ALONE.tp if over == "all_heads" else None)
    layer = layer.double()
    torch.manual_seed(0)
    layer.weight.data.normal_()
    sizes = (TOKENS, WIDTH) if over == "features" else (TOKENS, heads, WIDTH)
    x, dy = torch.randn(*sizes, dtype=torch.float64, requires_grad=True), torch.randn(*sizes, dtype=torch.float64)
    y = layer(x)
    y = y[1] if isinstance(y, tuple) else y
    found = (y, *torch.autograd.grad(y, (x, layer.weight), dy))
    weight = layer.weight.detach().view(sizes[1:]).requires_grad_()
    expected = _normed(x, weight, shape, dims=(-2, -1) if over == "all_heads" else (-1,))
    gradients = torch.autograd.grad(expected, (x, weight), dy)
    for one, other in zip(found, (expected, *gradients), strict=True):
        torch.testing.assert_close(one, other.view(one.shape), rtol=1e-10, atol=1e-12)


def test_one_plus_a_weight_is_not_rounded_to_its_dtype():
    """In bf16 1 + 2^-9 is 1."""
    layer = Norm(WIDTH, NormShape(kind="rmsnorm", epsilon=1e-6, zero_centered=True), kernels=PLAIN).bfloat16()
    layer.weight.data.fill_(2.0**-9)
    assert (layer.factor() == 1 + 2.0**-9).all()


@pytest.mark.parametrize("name", ["column", "row", "rmsnorm", "layernorm"])
def test_gradients_of_64_half_precision_microbatches_are_those_of_fp64(name):
    """bf16 has 8 bits: a sum of 64 gradients that were rounded on the way would be off by some 1e-3."""
    layer = _layer(name)
    named = {key: p for key, p in layer.named_parameters() if p is not None}
    layer.main_gradients.tensors |= {key: torch.zeros(p.shape) for key, p in named.items()}
    twin = _layer(name).double()
    for i in range(MICROBATCHES):
        x, dy = _draw(2 * i, TOKENS, WIDTH), _draw(2 * i + 1, TOKENS, WIDTH)
        y = layer(x.requires_grad_())
        (y[1] if isinstance(y, tuple) else y).backward(dy)
        _exact(name, twin, x.detach().double()).backward(dy.double())
    for key, parameter in named.items():
        assert parameter.grad is None
        expected = getattr(twin, key).grad
        error = (layer.main_gradients.tensors[key] - expected).abs().max() / expected.abs().max()
        assert error < 1e-6, key


def test_without_main_gradients_autograd_has_them():
    layer, x = _layer("column").double(), _draw(0, TOKENS, WIDTH).double().requires_grad_()
    layer(x).square().sum().backward()
    twin = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
    twin.load_state_dict(layer.state_dict())
    twin(x.detach()).square().sum().backward()
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad, rtol=1e-12, atol=0)
    torch.testing.assert_close(layer.bias.grad, twin.bias.grad, rtol=1e-12, atol=0)


def test_rows_that_come_often_are_added_in_a_wide_dtype():
    """4,096 times 1 in bf16 would stop at 256."""
    main = torch.zeros(3, 2)
    assert add_rows(main, torch.full((4096,), 1), dy_ND=torch.ones(4096, 2).bfloat16(), like=main) is None
    assert main.tolist() == [[0, 0], [4096, 4096], [0, 0]]


def test_few_rows_equal_the_sum_over_tokens_one_by_one():
    """What a GPU does for tables of token types."""
    rows, dy = torch.tensor([1, 0, 1, 1, 3]), _draw(1, 5, 8)
    summed, expected = torch.ones(4, 8), torch.ones(4, 8)
    add_few_rows(summed, rows, dy.bfloat16())
    for row, dy_D in zip(rows, dy.bfloat16().float(), strict=True):
        expected[row] += dy_D
    torch.testing.assert_close(summed, expected)


def test_what_a_main_gradient_holds_already_is_added_to():
    layer = PositionEmbedding(4, 2)
    layer.main_gradients.tensors["weight"] = torch.full(layer.weight.shape, 0.5)
    layer(torch.tensor([0, 0, 2])).sum().backward()
    assert layer.main_gradients.tensors["weight"][:4, 0].tolist() == [2.5, 0.5, 1.5, 0.5]


@pytest.mark.parametrize("column", [True, False])
def test_the_kernel_of_one_token_gets_no_more_of_them(column):
    """Nothing uses it on a CPU by itself."""
    layer, counts = _layer("column" if column else "row"), []
    use_one_row_kernel(layer, device=torch.device("cpu"))
    assert layer.one_row is None
    x = _draw(1, 3, WIDTH)
    with torch.no_grad():
        right = layer(x)
        layer.one_row = lambda x, weight: counts.append(len(x)) or F.linear(x.float(), weight.float()).bfloat16()
        torch.testing.assert_close(torch.cat((layer(x[:1]), layer(x[1:]))), right, rtol=1e-2, atol=1e-2)
    assert counts == [1]
