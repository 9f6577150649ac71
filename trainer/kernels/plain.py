"""The small operations in plain PyTorch: what each computes, and the twin of every faster implementation.

Each is a pure function of tensors, but for those whose name ends in `_`. Arithmetic is in at least fp32; results have
the dtype of the activations, gradients of weights stay wide. Backward functions are written out, because the layers
own their backward passes.

Shapes: N tokens, D hidden, F feed-forward, V local vocabulary rows, B batch, S sequence, E heads of
any kind, H query heads, G key-value heads, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

MUON_EPSILON = 1e-7  # least norm by which a matrix is divided before Newton-Schulz


def rms_norm(
    x_ND: Tensor, branch_ND: Tensor | None, weight_D: Tensor, bias_D: None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(x + branch, its norm, reciprocal of the root mean square [N, 1])."""
    sum_ND = x_ND if branch_ND is None else x_ND + branch_ND
    wide_ND = _widen(sum_ND)
    scale_N1 = (wide_ND.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return sum_ND, (wide_ND * scale_N1 * _widen(weight_D)).to(x_ND.dtype), scale_N1


def rms_norm_backward(
    dsum_ND: Tensor | None, dy_ND: Tensor, sum_ND: Tensor, weight_D: Tensor, scale_N1: Tensor
) -> tuple[Tensor, Tensor, None]:
    """(gradient of the sum, that of the weight, None)."""
    wide_dy_ND, unit_ND = _widen(dy_ND), _widen(sum_ND) * scale_N1
    g_ND = wide_dy_ND * _widen(weight_D)
    dx_ND = scale_N1 * (g_ND - unit_ND * (g_ND * unit_ND).mean(-1, keepdim=True))
    if dsum_ND is not None:
        dx_ND = dx_ND + _widen(dsum_ND)
    return dx_ND.to(dy_ND.dtype), (wide_dy_ND * unit_ND).sum(0), None


def layer_norm(
    x_ND: Tensor, branch_ND: Tensor | None, weight_D: Tensor, bias_D: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x + branch, its norm, mean [N, 1], reciprocal of the deviation [N, 1])."""
    sum_ND = x_ND if branch_ND is None else x_ND + branch_ND
    wide_ND = _widen(sum_ND)
    mean_N1 = wide_ND.mean(-1, keepdim=True)
    centred_ND = wide_ND - mean_N1
    scale_N1 = (centred_ND.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    y_ND = centred_ND * scale_N1 * _widen(weight_D) + _widen(bias_D)
    return sum_ND, y_ND.to(x_ND.dtype), mean_N1, scale_N1


def layer_norm_backward(
    dsum_ND: Tensor | None, dy_ND: Tensor, sum_ND: Tensor, weight_D: Tensor, mean_N1: Tensor, scale_N1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the sum, that of the weight, that of the bias)."""
    wide_dy_ND, unit_ND = _widen(dy_ND), (_widen(sum_ND) - mean_N1) * scale_N1
    g_ND = wide_dy_ND * _widen(weight_D)
    along_ND = unit_ND * (g_ND * unit_ND).mean(-1, keepdim=True)
    dx_ND = scale_N1 * (g_ND - g_ND.mean(-1, keepdim=True) - along_ND)
    if dsum_ND is not None:
        dx_ND = dx_ND + _widen(dsum_ND)
    return dx_ND.to(dy_ND.dtype), (wide_dy_ND * unit_ND).sum(0), wide_dy_ND.sum(0)


def swiglu(both_NF: Tensor) -> Tensor:
    """silu(gate) * up of [N, 2F], gate first: [N, F]."""
    gate_NF, up_NF = both_NF.chunk(2, dim=-1)
    return (F.silu(_widen(gate_NF)) * _widen(up_NF)).to(both_NF.dtype)


def swiglu_backward_(dgate_NF: Tensor, dup_NF: Tensor, dy_NF: Tensor, gate_NF: Tensor, up_NF: Tensor) -> None:
    """Write the gradients of gate and up; each may be half of one tensor, so that they need not be joined."""
    gate, up, dy = _widen(gate_NF), _widen(up_NF), _widen(dy_NF)
    sigmoid = gate.sigmoid()
    dgate_NF.copy_(dy * up * sigmoid * (1 + gate * (1 - sigmoid)))
    dup_NF.copy_(dy * gate * sigmoid)


def split_heads(
    qkv_BSEK: Tensor, cosine_SK: Tensor, sine_SK: Tensor, heads: int, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of E = H + 2G heads, q and k turned by the angle of their position; contiguous."""
    q_BSHK, k_BSGK, v_BSGK = qkv_BSEK.split((heads, groups, groups), dim=2)
    turned = (_rotate(x, cosine_SK, sine_SK) for x in (q_BSHK, k_BSGK))
    return *turned, v_BSGK.contiguous()


def join_heads_(
    out: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    rotation_SK: tuple[Tensor, Tensor] | None,
) -> None:
    """Write the gradients of q, k and v, the first two turned back, into three parts of one tensor."""
    dq, dk, dv = gradients
    if rotation_SK is not None:
        cosine_SK, sine_SK = rotation_SK
        dq, dk = (_rotate(x, cosine_SK, -sine_SK) for x in (dq, dk))
    for part, gradient in zip(out, (dq, dk, dv), strict=True):
        part.copy_(gradient)


def attention(q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor) -> Tensor:
    """Causal attention of whole sequences: [B, S, H, K]."""
    q_BHSK, k_BGSK, v_BGSK = (x.transpose(1, 2) for x in (q_BSHK, k_BSGK, v_BSGK))
    grouped = q_BSHK.shape[2] != k_BSGK.shape[2]
    y_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BGSK, v_BGSK, is_causal=True, enable_gqa=grouped)
    return y_BHSK.transpose(1, 2)


def logit_statistics(logits_NV: Tensor, column_N: Tensor, real: int) -> tuple[Tensor, Tensor, Tensor]:
    """(largest logit, sum of exp(logit - largest), the label's logit) of each token over this rank's columns.

    Args:
        column_N: the label's column here; -1 where another rank holds it, whose logit then counts as 0.
        real: columns that are not padding; a rank of padding alone has -inf, 0 and 0.
    """
    x_NV = _widen(logits_NV[:, :real])
    if not real:
        return x_NV.new_full((len(x_NV),), -torch.inf), x_NV.new_zeros(len(x_NV)), x_NV.new_zeros(len(x_NV))
    top_N = x_NV.amax(dim=1)
    total_N = (x_NV - top_N.unsqueeze(1)).exp().sum(dim=1)
    label_N = x_NV.gather(1, column_N.clamp(min=0).unsqueeze(1)).squeeze(1)
    return top_N, total_N, torch.where(column_N >= 0, label_N, 0.0)


def logits_to_gradient_(logits_NV: Tensor, log_total_N: Tensor, column_N: Tensor, weight_N: Tensor, real: int) -> None:
    """Overwrite logits by the loss's gradient: (softmax - one hot of the label) * weight, 0 in padding."""
    x_NV = _widen(logits_NV)
    ids_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    probability_NV = (x_NV - log_total_N.unsqueeze(1)).exp() - (ids_V == column_N.unsqueeze(1)).to(x_NV.dtype)
    gradient_NV = probability_NV * weight_N.to(x_NV.dtype).unsqueeze(1)
    logits_NV.copy_(torch.where(ids_V < real, gradient_NV, 0.0))


def adamw_(
    state: tuple[Tensor, Tensor, Tensor, Tensor],
    gradient: Tensor,
    numbers: Tensor,
    applied: Tensor,
    constants: tuple[float, float, float, float | Tensor],
) -> None:
    """One AdamW update (Loshchilov and Hutter 2019, algorithm 2) of flat tensors.

    Args:
        state: main weight, first and second moment, and the parameter that becomes the rounded weight.
        gradient: undivided.
        numbers: [5] in the main dtype: what the gradient is multiplied by, the learning rate, 1 - beta1^steps,
            1 - beta2^steps, steps.
        applied: bool scalar; nothing changes where it is False.
        constants: beta1, beta2, epsilon, weight decay; a scalar tensor where that changes from step to step.
    """
    weight, first, second, parameter = state
    factor, rate, correction1, correction2, _ = numbers.unbind(0)
    beta1, beta2, epsilon, decay = constants
    scaled = gradient * factor
    new_first = beta1 * first + (1 - beta1) * scaled
    new_second = beta2 * second + (1 - beta2) * scaled * scaled
    direction = (new_first / correction1) / ((new_second / correction2).sqrt() + epsilon)
    new_weight = torch.where(applied, weight - rate * (decay * weight + direction), weight)
    first.copy_(torch.where(applied, new_first, first))
    second.copy_(torch.where(applied, new_second, second))
    weight.copy_(new_weight)
    parameter.copy_(new_weight)


def sgd_(
    state: tuple[Tensor, Tensor, Tensor],
    gradient: Tensor,
    numbers: Tensor,
    applied: Tensor,
    constants: tuple[float, float | Tensor],
) -> None:
    """One update by gradient descent with momentum (Sutskever et al. 2013, in the form of torch and Megatron).

    The weight decay is not decoupled: it is added to the gradient.

    Args:
        state: main weight, momentum, and the parameter that becomes the rounded weight.
        gradient: undivided.
        numbers: [2] in the main dtype: what the gradient is multiplied by, the learning rate.
        applied: bool scalar; nothing changes where it is False.
        constants: momentum, weight decay; the latter a scalar tensor where it changes from step to step.
    """
    weight, first, parameter = state
    factor, rate = numbers.unbind(0)
    momentum, decay = constants
    new_first = momentum * first + (gradient * factor + decay * weight)
    new_weight = torch.where(applied, weight - rate * new_first, weight)
    first.copy_(torch.where(applied, new_first, first))
    weight.copy_(new_weight)
    parameter.copy_(new_weight)


def muon_direction_(first: Tensor, gradient: Tensor, factor: Tensor, applied: Tensor, momentum: float) -> Tensor:
    """Count a gradient into the momentum, and the direction that is then made orthogonal (Nesterov's); flat tensors.

    Args:
        first: the sum of gradients. gradient: undivided. factor: what the gradient is multiplied by, a scalar.
        applied: bool scalar; where it is False nothing changes, and the direction is 0.
    """
    scaled = gradient * factor.to(gradient.dtype)
    new_first = momentum * first + scaled
    first.copy_(torch.where(applied, new_first, first))
    return torch.where(applied, scaled + momentum * new_first, 0.0)


def muon_apply_(
    state: tuple[Tensor, Tensor], update: Tensor, rate: Tensor, applied: Tensor, decay: float | Tensor
) -> None:
    """Move (main weight, rounded parameter) by rate times (decay * weight + update); flat tensors."""
    weight, parameter = state
    moved = weight - rate.to(weight.dtype) * (decay * weight + update)
    weight.copy_(torch.where(applied, moved, weight))
    parameter.copy_(weight)


def orthogonalize(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix with the singular vectors of this one, and singular values near 1 (0.7 to 1.2): [rows, columns].

    Five iterations of a Newton-Schulz polynomial whose slope at 0 is steep (Jordan et al. 2024), with products in
    `dtype`. A matrix of zeros stays one.
    """
    wide = len(matrix) <= matrix.shape[1]
    norm = torch.linalg.matrix_norm(_widen(matrix)).clamp(min=MUON_EPSILON)
    x = (matrix / norm).to(dtype)
    x = x if wide else x.t()
    for _ in range(5):
        square = x @ x.t()
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x if wide else x.t()).to(matrix.dtype)


def _rotate(x_BSEK: Tensor, cosine_SK: Tensor, sine_SK: Tensor) -> Tensor:
    cosine, sine = cosine_SK.unsqueeze(1), sine_SK.unsqueeze(1)
    first, second = x_BSEK.to(cosine_SK.dtype).chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x_BSEK.dtype)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
