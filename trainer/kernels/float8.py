"""Matrices in FP8, in plain PyTorch: the twin of Transformer Engine's kernels.

Values are multiplied by a scale, rounded to 8 bits, and stored with the inverse of the scale. A matrix has one scale,
which is given (delayed scaling, from earlier steps) or computed from the largest value (current scaling), or one for
each block of BLOCK values along the summed dimension (blockwise, as DeepSeek-V3 was trained: Liu et al. 2024, section
3.3.2): a block is a part of a row, for inputs and gradients, or a square, for weights. A product multiplies the 8-bit
numbers, adds in fp32 and applies the inverses (Micikevicius et al. 2022, "FP8 Formats for Deep Learning"). In both
factors the summed dimension is last, as the matrix units of GPUs require; code that needs the other order also keeps
the transpose, whose blocks of rows are others. This implementation is slow; a CPU run with FP8 uses it.

Shapes: R rows, C columns; M, N rows of the factors, K the dimension that is summed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.kernels.plain import grouped_product

Blocks = Literal["none", "rows", "squares"]  # which values share a scale: all, a part of a row, or a square of BLOCK^2
BLOCK = 128
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST: Mapping[torch.dtype, float] = MappingProxyType({E4M3: 448.0, E5M2: 57344.0})
MULTIPLE = 16  # of every dimension of a product of FP8 matrices on a GPU


class Operand(NamedTuple):
    """One side of a product.

    Args:
        values_RK: with the summed dimension last.
        inverse: fp32, the factors that turn the values into the matrix. [1]; with blocks the library that rounded them
            decides on the order and padding; here [R or the squares along R, blocks along K].
        blocks: what has a factor of its own.
    """

    values_RK: Tensor
    inverse: Tensor
    blocks: Blocks = "none"


class Float8(NamedTuple):
    """A matrix in FP8, and its transpose, contiguous, if requested."""

    rows: Operand
    columns: Operand | None

    def tensors(self) -> tuple[Tensor, ...]:
        """All that it consists of."""
        return (*self.rows[:2], *(self.columns or ())[:2])


class Scaling(NamedTuple):
    """How a matrix is scaled.

    Args:
        scale_1: fp32[1]; None: the largest value of the matrix becomes the largest of the format.
        largest_1: fp32[1], raised to at least the largest absolute value of the matrix; None: not recorded.
        blocks: which values have a scale of their own: then both are None, and scales are powers of two.
    """

    scale_1: Tensor | None
    largest_1: Tensor | None
    blocks: Blocks = "none"


class Float8Rows(NamedTuple):
    """A matrix in FP8 with a scale for each row, or several, whose number comes first.

    Args:
        values_RC: E4M3. inverse_R1: fp32, the factors that turn the values into the matrix.
    """

    values_RC: Tensor
    inverse_R1: Tensor


def scale_for(largest: Tensor, *, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """The scale for values up to `largest`, 2^margin below the limit; 1 if `largest` is 0 or not finite."""
    scale = LARGEST[dtype] / largest / 2**margin
    usable = (largest > 0) & largest.isfinite() & scale.isfinite()
    return torch.where(usable, scale, 1.0)


def float8_quantize(x_RC: Tensor, dtype: torch.dtype, *, scaling: Scaling, columns: bool) -> Float8:
    """x in FP8; values out of range become the largest value.

    Args:
        dtype: E4M3 or E5M2. columns: whether to compute the transpose too.
    """
    wide_RC, limit, scale_1 = x_RC.float(), LARGEST[dtype], scaling.scale_1
    if scaling.blocks != "none":
        rows, turned_CR = _in_blocks(wide_RC, dtype, scaling.blocks), wide_RC.t().contiguous()
        return Float8(rows, _in_blocks(turned_CR, dtype, scaling.blocks) if columns else None)
    if scale_1 is None or scaling.largest_1 is not None:
        largest_1 = wide_RC.abs().amax().view(1)
        if scaling.largest_1 is not None:
            torch.maximum(scaling.largest_1, largest_1, out=scaling.largest_1)
        if scale_1 is None:
            scale_1 = scale_for(largest_1, dtype=dtype)
    values_RC, inverse_1 = (wide_RC * scale_1).clamp(-limit, limit).to(dtype), scale_1.reciprocal()
    rows = Operand(values_RC, inverse_1)
    return Float8(rows, Operand(values_RC.t().contiguous(), inverse_1) if columns else None)


def _in_blocks(wide_RK: Tensor, dtype: torch.dtype, blocks: Blocks) -> Operand:
    """x with a scale for each block, the largest power of two with which its largest value is not cut."""
    height, limit = BLOCK if blocks == "squares" else 1, LARGEST[dtype]
    padded = F.pad(wide_RK.abs(), (0, -wide_RK.shape[1] % BLOCK, 0, -len(wide_RK) % height))
    largest = padded.unflatten(1, (-1, BLOCK)).amax(2).unflatten(0, (-1, height)).amax(1)
    _, exponent = torch.frexp(scale_for(largest, dtype=dtype))
    scale = torch.ldexp(torch.ones_like(largest), exponent - 1)
    values_RK = (wide_RK * _spread(scale, blocks, wide_RK)).clamp(-limit, limit).to(dtype)
    return Operand(values_RK, scale.reciprocal(), blocks)


def _spread(factors: Tensor, blocks: Blocks, like_RK: Tensor) -> Tensor:
    """The factor of each value."""
    if blocks == "none":
        return factors
    rows = factors.repeat_interleave(BLOCK, 0)[: len(like_RK)] if blocks == "squares" else factors
    return rows.repeat_interleave(BLOCK, 1)[:, : like_RK.shape[1]]


def float8_product(
    left: Operand,
    right: Operand,
    *,
    dtype: torch.dtype,
    bias_N: Tensor | None = None,
    out: Tensor | None = None,
    add: bool = False,
    fast: bool = False,
) -> Tensor:
    """left right^T: [M, K] x [N, K] -> [M, N].

    Args:
        dtype: of the result. bias_N: added to each row.
        out: receives the result; add: add to its content.
        fast: whether a GPU may add in less than fp32 (accurate enough for the forward pass); no effect here.
    """
    left_MK, right_NK = (
        factor.values_RK.float() * _spread(factor.inverse, factor.blocks, factor.values_RK) for factor in (left, right)
    )
    product_MN = left_MK @ right_NK.t()
    if bias_N is not None:
        product_MN += bias_N
    if out is None:
        return product_MN.to(dtype)
    return out.add_(product_MN) if add else out.copy_(product_MN)


def float8_rows(x_RC: Tensor, largest_R1: Tensor | None = None) -> Float8Rows:
    """x in FP8, each row scaled by its largest absolute value; `largest_R1`: these, where the row has more columns."""
    wide_RC, limit = x_RC.float(), LARGEST[E4M3]
    scale_R1 = scale_for(wide_RC.abs().amax(-1, keepdim=True) if largest_R1 is None else largest_R1, dtype=E4M3)
    return Float8Rows((wide_RC * scale_R1).clamp(-limit, limit).to(E4M3), scale_R1.reciprocal())


def float8_rows_matrix(rows_RC: Float8Rows, *, dtype: torch.dtype) -> Tensor:
    """The matrix that the values and scales are of."""
    return (rows_RC.values_RC.float() * rows_RC.inverse_R1).to(dtype)


def float8_rows_product(left: Float8Rows, right: Float8Rows, *, dtype: torch.dtype) -> Tensor:
    """left right^T: [M, K] x [N, K] -> [M, N]."""
    product_MN = left.values_RC.float() @ right.values_RC.float().t()
    return (product_MN * left.inverse_R1 * right.inverse_R1.t()).to(dtype)


def float8_rows_grouped_product(x_MK: Tensor, right_ENK: Float8Rows, end_E: Tensor) -> Tensor:
    """x right_e^T of each row with the matrix of its group, x rounded by `float8_rows`: [M, N], in the dtype of x.

    Args:
        end_E: int32, where the rows of each group end; those of none are 0.
    """
    left_MK, matrices_ENK = (float8_rows_matrix(rows, dtype=torch.float32) for rows in (float8_rows(x_MK), right_ENK))
    return grouped_product(left_MK, matrices_ENK, end_E).to(x_MK.dtype)


def scaled_mm_rows_product(left: Float8Rows, right: Float8Rows, *, dtype: torch.dtype) -> Tensor:
    """The same by PyTorch's matrix product in FP8."""
    return torch._scaled_mm(
        left.values_RC.contiguous(),  # the rounded values keep the strides of what was rounded
        right.values_RC.t(),
        scale_a=left.inverse_R1,
        scale_b=right.inverse_R1.t(),
        out_dtype=dtype,
    )
