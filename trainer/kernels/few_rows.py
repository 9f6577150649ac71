"""Products of a few tokens with a matrix, on a GPU, where reading the matrix is all of the time.

Library products of one token are made for tiles of 64 or 128 tokens, too few of which have outputs to keep a GPU busy,
and in FP8 follow a kernel that rounds the token. Here each program computes a few outputs and
rounds the token itself. The twins are `float8_rows_product` of `float8_rows`, and x W^T; without Triton, or where a
trial differs, PyTorch's products are used for all.

Shapes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.kernels.float8 import Float8Rows, float8_rows, float8_rows_product
from trainer.kernels.self_test import refusals

FEW = 2  # tokens for which this is used in FP8: each reads the matrix, from the L2 cache but for the first


class Tile(NamedTuple):
    """What one program computes at a time: outputs and inputs; how many tiles are on their way, and its warps."""

    outputs: int = 16
    inputs: int = 512
    stages: int = 4
    warps: int = 4


FP8_TILE, TILE = Tile(), Tile(outputs=8)  # the fastest of eight for the shapes of 1B and 7B (benchmarks/few_rows.py)


def few_rows_product(x_NI: Tensor, rows_OI: Float8Rows, *, dtype: torch.dtype) -> Tensor:
    """x w^T with each token rounded to FP8: [N, O]."""
    return launch(x_NI, rows_OI.values_RC, rows_OI.inverse_R1, dtype=dtype)


def one_row_product(x_1I: Tensor, weight_OI: Tensor) -> Tensor:
    """x w^T of one token in its dtype, summed in fp32: [1, O]. Two tokens are faster with the library."""
    return launch(x_1I, weight_OI, None, dtype=x_1I.dtype)


def launch(
    x_NI: Tensor, weight_OI: Tensor, inverse_O1: Tensor | None, *, dtype: torch.dtype, tile: Tile | None = None
) -> Tensor:
    """The kernel; without `inverse_O1` nothing is rounded."""
    multiply = _kernel()
    assert multiply is not None, "triton is not installed"
    x_NI, weight_OI = x_NI.contiguous(), weight_OI.contiguous()
    tile = tile or (TILE if inverse_O1 is None else FP8_TILE)
    (tokens, width), outputs = x_NI.shape, len(weight_OI)
    y_NO = torch.empty(tokens, outputs, dtype=dtype, device=x_NI.device)
    multiply[(tokens, -(-outputs // tile.outputs))](
        x_NI, weight_OI, y_NO if inverse_O1 is None else inverse_O1, y_NO, outputs, width, x_NI.stride(0),
        BLOCK_O=tile.outputs, BLOCK_I=tile.inputs, STAGES=tile.stages, FP8=inverse_O1 is not None,
        num_warps=tile.warps,
    )  # fmt: skip
    return y_NO


@functools.cache
def works(device: torch.device) -> bool:
    """Whether a trial in FP8 gives what the plain functions give."""
    if _kernel() is None:
        return False
    generator = torch.Generator(device).manual_seed(1)
    x_NI, weight_OI = (torch.randn(n, 1040, generator=generator, device=device).bfloat16() for n in (FEW, 96))
    rows_OI = float8_rows(weight_OI)
    right_NO = float8_rows_product(float8_rows(x_NI), rows_OI, dtype=torch.float32)
    return _is_near(lambda: few_rows_product(x_NI, rows_OI, dtype=torch.float32), right_NO, tolerance=2e-3)


@functools.cache
def works_without_rounding(device: torch.device) -> bool:
    """Whether a trial of `one_row_product` gives what the plain product gives."""
    if _kernel() is None:
        return False
    generator = torch.Generator(device).manual_seed(1)
    x_1I, weight_OI = (torch.randn(n, 1040, generator=generator, device=device).bfloat16() for n in (1, 96))
    right_1O = x_1I.float() @ weight_OI.float().t()
    return _is_near(lambda: one_row_product(x_1I, weight_OI), right_1O, tolerance=1e-2)


def _is_near(trial: Callable[[], Tensor], right: Tensor, *, tolerance: float) -> bool:
    try:
        return bool((trial() - right).abs().amax() <= tolerance * right.abs().amax())
    except refusals():
        return False


@functools.cache
def _kernel() -> Any | None:
    """Compiled when it is first called; None without Triton."""
    try:
        from trainer.kernels.few_rows_triton import multiply
    except ImportError:
        return None
    return multiply
