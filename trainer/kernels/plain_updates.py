"""The parameter updates in plain PyTorch: they define each rule, and are the twin of every faster implementation.

Arguments are flat tensors, written in place, except the matrices of Muon. Nothing waits for the device: a step that
must not be applied is computed and discarded. updates.py says which parameters a rule applies to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MUON_EPSILON = 1e-7  # smallest norm by which a matrix is divided before Newton-Schulz


def adamw_(
    state: tuple[Tensor, Tensor, Tensor, Tensor | None],
    gradient: Tensor,
    numbers: Tensor,
    applied: Tensor,
    constants: tuple[float, float, float, float | Tensor],
) -> None:
    """One AdamW update (Loshchilov and Hutter 2019, algorithm 2) of flat tensors.

    Args:
        state: main weight, first and second moment, and the parameter that becomes the rounded weight; None: the main
            weight is the parameter.
        gradient: undivided.
        numbers: [5] in the main dtype: what the gradient is multiplied by, the learning rate, 1 - beta1^steps,
            1 - beta2^steps, steps.
        applied: bool scalar; nothing changes where it is False.
        constants: beta1, beta2, epsilon, weight decay; a scalar tensor where that changes from step to step.
    """
    weight, first, second, parameter = state
    factor, rate, correction1, correction2, _ = numbers.unbind(0)
    beta1, beta2, epsilon, decay = constants
    scaled = gradient.to(weight.dtype) * factor
    new_first = beta1 * first + (1 - beta1) * scaled
    new_second = beta2 * second + (1 - beta2) * scaled * scaled
    direction = (new_first / correction1) / ((new_second / correction2).sqrt() + epsilon)
    new_weight = torch.where(applied, weight - rate * (decay * weight + direction), weight)
    first.copy_(torch.where(applied, new_first, first))
    second.copy_(torch.where(applied, new_second, second))
    weight.copy_(new_weight)
    if parameter is not None:
        parameter.copy_(new_weight)


def sgd_(
    state: tuple[Tensor, Tensor, Tensor | None],
    gradient: Tensor,
    numbers: Tensor,
    applied: Tensor,
    constants: tuple[float, float | Tensor],
) -> None:
    """One update by gradient descent with momentum (Sutskever et al. 2013, in the form of torch and Megatron).

    The weight decay is not decoupled: it is added to the gradient.

    Args:
        state: main weight, momentum, and the parameter that becomes the rounded weight, or None.
        gradient: undivided.
        numbers: [2] in the main dtype: what the gradient is multiplied by, the learning rate.
        applied: bool scalar; nothing changes where it is False.
        constants: momentum, weight decay; the latter a scalar tensor where it changes from step to step.
    """
    weight, first, parameter = state
    factor, rate = numbers.unbind(0)
    momentum, decay = constants
    new_first = momentum * first + (gradient.to(weight.dtype) * factor + decay * weight)
    new_weight = torch.where(applied, weight - rate * new_first, weight)
    first.copy_(torch.where(applied, new_first, first))
    weight.copy_(new_weight)
    if parameter is not None:
        parameter.copy_(new_weight)


def muon_momentum_(
    first: Tensor, gradient: Tensor, factor: Tensor, applied: Tensor, constants: tuple[float, bool]
) -> Tensor:
    """Add a gradient to its running mean, and return the direction to be orthogonalized; flat tensors.

    Args:
        first: the mean of gradients. gradient: undivided. factor: scalar by which the gradient is multiplied.
        applied: bool scalar; if False, the mean does not change.
        constants: decay of the mean; whether the direction looks ahead (Nesterov's) or is the mean.
    """
    momentum, nesterov = constants
    scaled = gradient.to(first.dtype) * factor.to(first.dtype)
    mean = momentum * first + (1 - momentum) * scaled
    first.copy_(torch.where(applied, mean, first))
    return momentum * mean + (1 - momentum) * scaled if nesterov else mean.clone()


def muon_apply_(
    state: tuple[Tensor, Tensor | None], update: Tensor, rate: Tensor, applied: Tensor, decay: float | Tensor
) -> None:
    """Move flat (main weight, rounded parameter or None) by rate times (decay * weight + update) where `applied`."""
    weight, parameter = state
    moved = weight - rate.to(weight.dtype) * (decay * weight + update)
    weight.copy_(torch.where(applied, moved, weight))
    if parameter is not None:
        parameter.copy_(weight)


def orthogonalize(matrix: Tensor, dtype: torch.dtype, coefficients: Sequence[tuple[float, float, float]]) -> Tensor:
    """A matrix with the singular vectors of this one and singular values near 1: [rows, columns].

    Newton-Schulz iterations x <- a x + (b x x^T + c (x x^T)^2) x, with polynomials whose slope at 0 is steep (Jordan et
    al. 2024), and products in `dtype`. A zero matrix stays zero.

    Args:
        coefficients: (a, b, c) of each iteration.
    """
    wide = len(matrix) <= matrix.shape[1]
    norm = torch.linalg.matrix_norm(matrix.to(torch.promote_types(matrix.dtype, torch.float32))).clamp(min=MUON_EPSILON)
    x = (matrix / norm).to(dtype)
    x = x if wide else x.t()
    for a, b, c in coefficients:
        square = x @ x.t()
        x = a * x + (b * square + c * square @ square) @ x
    return (x if wide else x.t()).to(matrix.dtype)
