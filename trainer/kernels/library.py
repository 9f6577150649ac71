"""Operations for which PyTorch has its own kernels that are faster on a CPU than the plain form.

Each has the signature of its plain twin in plain.py; tests/trainer/kernels compares them. For fp32 and fp64 activations
only: in half precision these kernels round intermediate results, which the plain functions do not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from trainer.kernels.plain import AdamConstants, AdamState, AdamStep, SgdConstants, SgdState, SgdStep


def layer_norm(
    x_ND: Tensor, branch_ND: Tensor | None, weight_D: Tensor, bias_D: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See plain.layer_norm."""
    sum_ND = x_ND if branch_ND is None else x_ND + branch_ND
    y_ND, mean_N1, scale_N1 = torch.native_layer_norm(sum_ND, weight_D.shape, weight_D, bias_D, epsilon)
    return sum_ND, y_ND, mean_N1, scale_N1


def layer_norm_backward(
    dsum_ND: Tensor | None, dy_ND: Tensor, sum_ND: Tensor, weight_D: Tensor, mean_N1: Tensor, scale_N1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See plain.layer_norm_backward."""
    like_bias = weight_D  # the kernel only uses its shape
    dx_ND, dweight_D, dbias_D = torch.ops.aten.native_layer_norm_backward(
        dy_ND.contiguous(), sum_ND, weight_D.shape, mean_N1, scale_N1, weight_D, like_bias, [True, True, True]
    )
    return (dx_ND if dsum_ND is None else dx_ND.add_(dsum_ND)), dweight_D, dbias_D


def swiglu_backward_(dgate_NF: Tensor, dup_NF: Tensor, dy_NF: Tensor, gate_NF: Tensor, up_NF: Tensor) -> None:
    """See plain.swiglu_backward_."""
    dgate_NF.copy_(torch.ops.aten.silu_backward(dy_NF * up_NF, gate_NF))
    torch.mul(dy_NF, F.silu(gate_NF), out=dup_NF)


def logits_to_gradient_(logits_NV: Tensor, log_total_N: Tensor, column_N: Tensor, weight_N: Tensor, real: int) -> None:
    """See plain.logits_to_gradient_."""
    logits_NV.sub_(log_total_N.unsqueeze(1)).exp_()
    mine_N = column_N >= 0
    logits_NV[mine_N, column_N[mine_N]] -= 1
    logits_NV.mul_(weight_N.to(logits_NV.dtype).unsqueeze(1))
    logits_NV[:, real:] = 0


def adamw_(state: AdamState, gradient: Tensor, numbers: Tensor, applied: Tensor, constants: AdamConstants) -> None:
    """See plain.adamw_; one pass over memory. Overwrites the gradient."""
    if not applied:
        return
    weight, first, second, parameter = state
    step: AdamStep[float] = AdamStep(*numbers.tolist())
    beta1, beta2, epsilon, decay = constants
    gradient.mul_(step.factor)
    adamw(
        [weight],
        [gradient],
        [first],
        [second],
        max_exp_avg_sqs=[],
        # The kernel counts up before it corrects the bias.
        state_steps=[torch.tensor(step.steps - 1, dtype=torch.float32)],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=step.rate,
        weight_decay=float(decay),
        eps=epsilon,
        maximize=False,
    )
    if parameter is not None:
        parameter.copy_(weight)


def sgd_(state: SgdState, gradient: Tensor, numbers: Tensor, applied: Tensor, constants: SgdConstants) -> None:
    """See plain.sgd_; one pass over memory. Overwrites the gradient."""
    if not applied:
        return
    weight, first, parameter = state
    step: SgdStep[float] = SgdStep(*numbers.tolist())
    momentum, decay = constants
    sgd(
        [weight],
        [gradient.mul_(step.factor)],
        [first],
        fused=True,
        weight_decay=float(decay),
        momentum=momentum,
        lr=step.rate,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    if parameter is not None:
        parameter.copy_(weight)
