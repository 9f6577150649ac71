"""Products of a few tokens: the Triton kernel against its twin, on a GPU.

TRITON_INTERPRET=1 runs the kernel on a CPU, where Triton is installed.
"""

from __future__ import annotations

import os

import pytest
import torch

from trainer.kernels import few_rows
from trainer.kernels.few_rows import FEW, Tile
from trainer.kernels.float8 import float8_rows, float8_rows_product

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL = Tile(outputs=8, inputs=64, stages=2)
CASES = {  # tokens, inputs, outputs, tile
    "one token": (1, 2048, 64, None),
    "few tokens": (FEW, 1040, 50, None),
    "inputs and outputs that fill no tile": (3, 112, 13, SMALL),
    "fewer inputs than a tile": (1, 16, 16, None),
}


def drawn(*shape):
    """Numbers whose rounding to FP8 is exact, because the interpreter rounds wrongly."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    x[..., 0] = 6.0
    rows = float8_rows(x)
    return (rows.values_RC.float() / 64).to(DEVICE)


@pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_the_plain_product(name):
    tokens, inputs, outputs, tile = CASES[name]
    x = drawn(tokens, inputs) if INTERPRETED else torch.randn(tokens, inputs, device=DEVICE).bfloat16()
    if tokens > 2:
        x[1] = 0.0
    rows = float8_rows(0.02 * torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(2)).to(DEVICE))
    right = float8_rows_product(float8_rows(x), rows, dtype=torch.float32)
    found = few_rows.launch(x, *rows, dtype=torch.float32, tile=tile)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-5 if INTERPRETED else 2e-3 * float(right.abs().amax()))
    assert not torch.equal(found, torch.zeros_like(found))


@pytest.mark.skipif(not (torch.cuda.is_available() or INTERPRETED), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_without_scales_nothing_is_rounded(name):
    tokens, inputs, outputs, tile = CASES[name]
    x, weight = (torch.randn(rows, inputs, device=DEVICE) for rows in (tokens, outputs))
    found = few_rows.launch(x, weight, None, dtype=torch.float32, tile=tile)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_trial_of_a_gpu():
    assert few_rows.works(torch.device("cuda"))
    assert few_rows.works_without_rounding(torch.device("cuda"))
