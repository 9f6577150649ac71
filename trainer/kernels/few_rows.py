"""Products of a few tokens with a matrix, on a GPU, where reading the matrix is all of the time.

Library products of one token are made for tiles of 64 or 128 tokens, too few of which have outputs to keep a GPU busy,
and follow a kernel that rounds the token. Here each program computes a few outputs and
rounds the token itself. The twin is `float8_rows_product` of `float8_rows`; without Triton, or where a trial differs,
PyTorch's product is used for all.

Shapes: N tokens, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.kernels.float8 import Float8Rows, float8_rows, float8_rows_product

FEW = 2  # tokens for which this is used: each reads the matrix, from the L2 cache but for the first


class Tile(NamedTuple):
    """What one program computes at a time: outputs and inputs; how many tiles are on their way, and its warps."""

    outputs: int = 4
    inputs: int = 1024
    stages: int = 4
    warps: int = 4


def few_rows_product(x_NI: Tensor, rows_OI: Float8Rows, *, dtype: torch.dtype) -> Tensor:
    """x w^T with each token rounded to FP8: [N, O]."""
    return launch(x_NI, rows_OI.values_RC, rows_OI.inverse_R1, dtype=dtype)


def launch(
    x_NI: Tensor, weight_OI: Tensor, inverse_O1: Tensor | None, *, dtype: torch.dtype, tile: Tile | None = None
) -> Tensor:
    """The kernel; without `inverse_O1` nothing is rounded."""
    multiply = _kernel()
    assert multiply is not None, "triton is not installed"
    x_NI, weight_OI = x_NI.contiguous(), weight_OI.contiguous()
    tile = tile or Tile()
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
    """Whether a trial gives what the plain functions give."""
    if _kernel() is None:
        return False
    generator = torch.Generator(device).manual_seed(1)
    x_NI, weight_OI = (torch.randn(n, 1040, generator=generator, device=device).bfloat16() for n in (FEW, 96))
    rows_OI = float8_rows(weight_OI)
    right_NO = float8_rows_product(float8_rows(x_NI), rows_OI, dtype=torch.float32)
    difference = (few_rows_product(x_NI, rows_OI, dtype=torch.float32) - right_NO).abs().amax()
    return bool(difference <= 2e-3 * right_NO.abs().amax())


@functools.cache
def _kernel() -> Any | None:
    """Compiled when it is first called; None without Triton."""
    try:
        from trainer.kernels.few_rows_triton import multiply
    except ImportError:
        return None
    return multiply
