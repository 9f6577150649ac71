"""Operations on rows of experts that leave out the rows behind the last group's, by Triton kernels (rows_triton.py).

Only the device knows how many rows there are; operations of other libraries take all that have memory. Each function
has the signature of its plain twin, and is that twin, compiled, where a trial of the kernels fails.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.kernels import plain
from trainer.kernels.self_test import TOLERANCES, refusals

ROWS, FEATURES = 4, 256  # of a block
TAKEN = 1024  # features of a block of rows that are only copied


def take_rows(x_AD: Tensor, token_M: Tensor, end_E: Tensor) -> Tensor:
    """See plain.take_rows."""
    if not fits(x_AD.device, x_AD.dtype):
        return plain.take_rows(x_AD, token_M, end_E)
    return _take_rows(x_AD, token_M, end_E)


def weigh_swiglu(both_MF: Tensor, weight_M: Tensor, end_E: Tensor) -> Tensor:
    """See plain.weigh_swiglu."""
    chosen = _weigh if fits(both_MF.device, both_MF.dtype) else _compiled(plain.weigh_swiglu)
    return chosen(both_MF, weight_M, end_E)


def weigh_swiglu_backward(dz_MF: Tensor, both_MF: Tensor, weight_M: Tensor, end_E: Tensor) -> tuple[Tensor, Tensor]:
    """See plain.weigh_swiglu_backward."""
    chosen = _weigh_backward if fits(both_MF.device, both_MF.dtype) else _compiled(plain.weigh_swiglu_backward)
    return chosen(dz_MF, both_MF, weight_M, end_E)


@functools.cache
def fits(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether these kernels run on the device and give what the plain functions give."""
    if device.type != "cuda" or dtype not in TOLERANCES:
        return False
    failures: tuple[type[Exception], ...] = (ImportError, *refusals())
    try:
        return largest_difference(device, dtype) <= TOLERANCES[dtype]
    except failures:
        return False


def largest_difference(device: torch.device, dtype: torch.dtype) -> float:
    """Of results from those of the plain functions in fp32, relative to their norm; infinite for what is not finite."""
    draw = torch.Generator().manual_seed(1)
    rows, width, tokens = 301, 264, 90
    x, both, dz = (torch.randn(n, f, generator=draw) for n, f in ((tokens, width), (rows, 2 * width), (rows, width)))
    x, both, dz = (part.to(device, dtype) for part in (x, both, dz))
    weight, token = (
        torch.rand(rows, generator=draw).to(device),
        torch.randint(tokens, (rows,), generator=draw).to(device),
    )
    end = torch.tensor([70, 70, 289], dtype=torch.int32, device=device)
    found = _take_rows(x, token, end), _weigh(both, weight, end), *_weigh_backward(dz, both, weight, end)
    x, both, dz = x.float(), both.float(), dz.float()
    right = x[token], plain.weigh_swiglu(both, weight, end), *plain.weigh_swiglu_backward(dz, both, weight, end)
    errors = [
        float((ours[:289].float() - twin[:289]).norm() / twin[:289].norm())
        for ours, twin in zip(found, right, strict=True)
    ]
    return max(error if error == error else torch.inf for error in errors)


def _take_rows(x_AD: Tensor, token_M: Tensor, end_E: Tensor) -> Tensor:
    y_MD = x_AD.new_empty(len(token_M), x_AD.shape[1])
    _kernels().take[(-(-len(token_M) // ROWS),)](
        x_AD.contiguous(), token_M, end_E, y_MD, x_AD.shape[1], LAST=len(end_E) - 1, BLOCK_M=ROWS, BLOCK_F=TAKEN
    )
    return y_MD


def _weigh(both_MF: Tensor, weight_M: Tensor, end_E: Tensor) -> Tensor:
    rows, width = len(both_MF), both_MF.shape[1] // 2
    z_MF = both_MF.new_empty(rows, width)
    _kernels().weigh_swiglu[(-(-rows // ROWS), -(-width // FEATURES))](
        both_MF.contiguous(), weight_M, end_E, z_MF, width, LAST=len(end_E) - 1, BLOCK_M=ROWS, BLOCK_F=FEATURES
    )
    return z_MF


def _weigh_backward(dz_MF: Tensor, both_MF: Tensor, weight_M: Tensor, end_E: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = len(both_MF), both_MF.shape[1] // 2
    dboth_MF, dweight_M = both_MF.new_empty(both_MF.shape), torch.empty_like(weight_M)
    _kernels().weigh_swiglu_gradients[(-(-rows // ROWS),)](
        dz_MF.contiguous(), both_MF.contiguous(), weight_M, end_E, dboth_MF, dweight_M, width,
        LAST=len(end_E) - 1, BLOCK_M=ROWS, BLOCK_F=FEATURES,
    )  # fmt: skip
    return dboth_MF, dweight_M


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def _kernels() -> Any:
    """Compiled when they are first called."""
    from trainer.kernels import rows_triton

    return rows_triton
