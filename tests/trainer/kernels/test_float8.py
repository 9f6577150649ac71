"""FP8 in plain PyTorch: scales, rounding, and products of FP8 matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from trainer.kernels.float8 import (
    BLOCK,
    E4M3,
    E5M2,
    LARGEST,
    Float8Rows,
    Scaling,
    float8_product,
    float8_quantize,
    float8_rows,
    float8_rows_grouped_product,
    float8_rows_product,
    scale_for,
    scaled_mm_rows_product,
)
from trainer.kernels.gpu import float8_grouped_product, widened_grouped_product
from trainer.kernels.self_test import float8_differences, float8_grouped_differences, float8_rows_differences

FORMATS = st.sampled_from((E4M3, E5M2))
MANTISSA = {E4M3: 3, E5M2: 2}
SMALLEST_NORMAL = {E4M3: 2.0**-6, E5M2: 2.0**-14}
NONE = Scaling(None, None)


def _draw(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def _rounded(x: float, dtype: torch.dtype) -> float:
    """The nearest number of the format, the even one of two, by its definition; the largest where x is beyond it."""
    if abs(x) >= LARGEST[dtype]:
        return LARGEST[dtype] if x > 0 else -LARGEST[dtype]
    if x == 0:
        return 0.0
    exponent = max(torch.tensor(abs(x)).log2().floor().item(), torch.tensor(SMALLEST_NORMAL[dtype]).log2().item())
    step = 2.0 ** (exponent - MANTISSA[dtype])
    return round(x / step) * step  # Python rounds halves to even


@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=8), FORMATS, st.integers(-8, 8))
def test_a_value_becomes_the_nearest_one_of_its_format(values, dtype, power):
    scale = torch.tensor([2.0**power])
    x = torch.tensor([values])
    got = float8_quantize(x, dtype, scaling=Scaling(scale, None), columns=True)
    assert got.rows.values_RK.float().tolist()[0] == [_rounded(v * 2.0**power, dtype) for v in x.tolist()[0]]
    assert got.rows.inverse.item() == 2.0**-power
    assert got.columns is not None and got.columns.inverse is got.rows.inverse
    assert torch.equal(got.columns.values_RK.float(), got.rows.values_RK.float().t())


@given(st.integers(0, 1000), FORMATS, st.floats(1e-6, 1e6))
def test_a_matrix_scaled_by_its_own_largest_value_fills_the_format(seed, dtype, size):
    x = _draw(seed, 8, 16) * size
    got = float8_quantize(x, dtype, scaling=NONE, columns=False)
    assert got.columns is None
    assert got.rows.values_RK.float().abs().max() == LARGEST[dtype]
    error = (got.rows.values_RK.float() * got.rows.inverse - x).norm() / x.norm()
    assert error < 2.0 ** -(MANTISSA[dtype] + 1)


def test_the_largest_value_is_raised_and_never_lowered():
    largest, one = torch.tensor([2.0]), torch.ones(1)
    for x, expected in ((1.0, 2.0), (-3.0, 3.0), (2.5, 3.0)):
        float8_quantize(torch.tensor([[0.5, x]]), E4M3, scaling=Scaling(one, largest), columns=False)
        assert largest.item() == expected
    float8_quantize(torch.tensor([[9.0]]), E4M3, scaling=Scaling(None, largest), columns=False)
    assert largest.item() == 9.0


@pytest.mark.parametrize("largest", [0.0, float("inf"), float("nan"), 1e-44])
def test_a_scale_without_a_usable_largest_value_is_one(largest):
    assert scale_for(torch.tensor([largest]), dtype=E4M3).item() == 1.0


def test_a_margin_leaves_room():
    assert scale_for(torch.tensor([7.0]), dtype=E5M2, margin=3).item() == 57344 / 7 / 8


@given(st.integers(0, 1000))
def test_a_product_is_that_of_what_was_rounded(seed):
    a, b = (float8_quantize(_draw(seed + i, n, 32), E4M3, scaling=NONE, columns=False) for i, n in ((0, 16), (1, 48)))
    bias, out = _draw(seed + 2, 48), _draw(seed + 3, 16, 48)
    left, right = a.rows, b.rows
    exact = (left.values_RK.double() * left.inverse) @ (right.values_RK.double() * right.inverse).t()
    torch.testing.assert_close(float8_product(left, right, dtype=torch.float64), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        float8_product(left, right, dtype=torch.float32, bias_N=bias), (exact + bias).float(), rtol=1e-5, atol=1e-5
    )
    before = out.double()
    assert float8_product(left, right, dtype=torch.float32, out=out, add=True) is out
    torch.testing.assert_close(out.double(), before + exact, rtol=1e-5, atol=1e-5)
    float8_product(left, right, dtype=torch.float32, out=out.fill_(torch.nan))
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def _in_blocks(x: torch.Tensor, dtype: torch.dtype, height: int) -> torch.Tensor:
    """What a matrix is after rounding with the largest power of two for each block that cuts nothing, in fp64."""
    made = torch.zeros(x.shape, dtype=torch.float64)
    for top in range(0, x.shape[0], height):
        for left in range(0, x.shape[1], BLOCK):
            block = x[top : top + height, left : left + BLOCK]
            largest = float(block.abs().max())
            scale = 1.0
            while largest and largest * scale * 2 <= LARGEST[dtype]:
                scale *= 2
            while largest * scale > LARGEST[dtype]:
                scale /= 2
            rounded = [[_rounded(value * scale, dtype) / scale for value in row] for row in block.tolist()]
            made[top : top + height, left : left + BLOCK] = torch.tensor(rounded, dtype=torch.float64)
    return made


@pytest.mark.parametrize(("blocks", "height"), [("rows", 1), ("squares", BLOCK)])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_each_block_is_scaled_by_its_own_largest_value(blocks, height, dtype):
    """Also blocks that are cut by the end of the matrix, blocks of zeros, and those of the transpose."""
    x = _draw(6, 130, 2 * BLOCK + 3) * torch.logspace(-4, 4, 2 * BLOCK + 3)
    x[:, BLOCK : 2 * BLOCK] *= torch.arange(130).ge(128).unsqueeze(1)  # zeros in the middle of the first rows
    got = float8_quantize(x, dtype, scaling=Scaling(None, None, blocks), columns=True)
    one = torch.eye(x.shape[1])
    whole = float8_quantize(one, E4M3, scaling=NONE, columns=False).rows
    for operand, matrix in ((got.rows, x), (got.columns, x.t())):
        unit = whole if matrix is x else float8_quantize(torch.eye(len(x)), E4M3, scaling=NONE, columns=False).rows
        assert operand is not None and operand.blocks == blocks
        values = float8_product(operand, unit, dtype=torch.float64)
        assert torch.equal(values, _in_blocks(matrix, dtype, height))


@examples(4)  # the slow twin takes half a second
@given(st.integers(0, 100))
def test_a_product_of_blocks_is_that_of_what_was_rounded(seed):
    x, w = _draw(seed, 5, 300), _draw(seed + 1, 140, 300)
    left = float8_quantize(x, E4M3, scaling=Scaling(None, None, "rows"), columns=False).rows
    right = float8_quantize(w, E4M3, scaling=Scaling(None, None, "squares"), columns=False).rows
    exact = _in_blocks(x, E4M3, 1) @ _in_blocks(w, E4M3, BLOCK).t()
    torch.testing.assert_close(float8_product(left, right, dtype=torch.float64), exact, rtol=1e-5, atol=1e-5)


def test_the_trial_of_blocks_sees_a_scale_of_another_block():
    def shifted(x, dtype, *, scaling, columns):
        made = float8_quantize(x, dtype, scaling=scaling, columns=columns)
        return made._replace(rows=made.rows._replace(inverse=made.rows.inverse.roll(1, 1)))

    cpu = torch.device("cpu")
    assert not float8_differences(float8_quantize, float8_product, device=cpu, blocks=True)
    assert "the product" in float8_differences(shifted, float8_product, device=cpu, blocks=True)


def test_rows_are_scaled_by_their_own_largest_values():
    x = _draw(5, 4, 32) * torch.tensor([[1e-3], [1.0], [0.0], [1e4]])
    rows = float8_rows(x)
    assert rows.values_RC.float().abs().amax(-1).tolist() == [448.0, 448.0, 0.0, 448.0]
    for row in (0, 1, 3):
        one = float8_quantize(x[row : row + 1], E4M3, scaling=NONE, columns=False)
        assert torch.equal(rows.values_RC[row].float(), one.rows.values_RK[0].float())
        assert rows.inverse_R1[row] == one.rows.inverse
    half = float8_rows(x[:, :16], x.abs().amax(-1, keepdim=True))
    assert torch.equal(half.values_RC.float(), rows.values_RC[:, :16].float())


def test_pytorchs_product_of_rows_is_that_of_the_plain_one():
    """Which PyTorch has on a CPU, too, with the arguments that a GPU gets; not so 2.11."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert not float8_rows_differences(float8_rows, scaled_mm_rows_product, device=device)

    def doubled(*rows, dtype):
        return 2 * float8_rows_product(*rows, dtype=dtype)

    assert "the product" in float8_rows_differences(float8_rows, doubled, device=device)


def _grouped(tokens=6, width=32):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, 16, generator=generator).bfloat16()
    weights = float8_rows(torch.randn(3, width, 16, generator=generator))
    return x, weights, torch.tensor([tokens // 3, tokens // 3, tokens], dtype=torch.int32)


def test_products_of_experts_are_those_of_each_group():
    x, weights, ends = _grouped()
    got = float8_rows_grouped_product(x, weights, ends)
    for expert, rows in ((0, slice(0, 2)), (2, slice(2, 6))):
        one = Float8Rows(weights.values_RC[expert], weights.inverse_R1[expert])
        wanted = float8_rows_product(float8_rows(x[rows]), one, dtype=torch.bfloat16)
        torch.testing.assert_close(got[rows], wanted)
    wider = widened_grouped_product(x, weights, ends)
    assert 0 < (wider - got).norm() < 0.05 * got.norm(), "x is not rounded"


def test_pytorchs_product_of_experts_gets_what_it_asks_for(monkeypatch):
    """It has none on a CPU. Here is what it is said to compute."""

    def scaled_grouped_mm(a_MK, b_EKN, scale_M, scale_EN, *, offs, out_dtype, use_fast_accum):
        assert use_fast_accum and a_MK.is_contiguous() and b_EKN.transpose(1, 2).is_contiguous()
        assert scale_M.shape == (len(a_MK),) and scale_EN.shape == b_EKN.shape[::2] and scale_EN.is_contiguous()
        y_MN, start = torch.zeros(len(a_MK), b_EKN.shape[2]), 0
        for expert, stop in enumerate(offs.tolist()):
            product = a_MK[start:stop].float() @ b_EKN[expert].float()
            y_MN[start:stop] = product * scale_M[start:stop, None] * scale_EN[expert]
            start = stop
        return y_MN.to(out_dtype)

    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    cpu = torch.device("cpu")
    assert not float8_grouped_differences(float8_grouped_product, device=cpu)
    assert "the product of experts" in float8_grouped_differences(
        lambda *given: 2 * float8_grouped_product(*given), device=cpu
    )
    monkeypatch.setattr(torch, "_scaled_grouped_mm", None)
    for sizes in ((0, 32), (6, 24)):  # no rows, and a width that it does not take
        x, weights, ends = _grouped(*sizes)
        assert torch.equal(float8_grouped_product(x, weights, ends), widened_grouped_product(x, weights, ends))
