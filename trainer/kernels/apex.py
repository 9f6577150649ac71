"""NVIDIA apex behind the interface of this room: norms, AdamW, and weight gradients added to fp32.

apex is built from its repository (https://github.com/NVIDIA/apex, with --cuda_ext and --distributed_adam); the package
with that name on PyPI is a different one. Each of its extensions is a separate module, imported at its first use. None
of it is faster than the default kernels of a run (docs/design/one-gpu.md); it is here for comparison.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from trainer.kernels.plain import AdamConstants, AdamState, AdamStep

NAME = "NVIDIA apex"
CHUNK = 2048 * 32  # elements of a tensor per block of threads, apex's own choice
ADAMW_MODE = 1  # decoupled weight decay
EXTENSIONS = {
    "norm": "fused_layer_norm_cuda",
    "optimizer": "distributed_adam_cuda",
    "weight_gradient": "fused_weight_gradient_mlp_cuda",
}


def missing(operation: str, device: torch.device) -> str:
    """Why apex cannot serve an operation of the section [kernels]; empty: it can."""
    if importlib.util.find_spec(EXTENSIONS[operation]) is None:
        return f"its extension {EXTENSIONS[operation]} is not installed"
    return "" if device.type == "cuda" else "it runs on GPUs only"


def _extension(operation: str) -> Any:
    return importlib.import_module(EXTENSIONS[operation])


def rms_norm(
    x_ND: Tensor, branch_ND: Tensor | None, weight_D: Tensor, bias_D: None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See plain.rms_norm; the addition is a separate pass."""
    sum_ND = x_ND if branch_ND is None else x_ND + branch_ND
    y_ND, scale_N = _extension("norm").rms_forward_affine(sum_ND, weight_D.shape, weight_D, epsilon)
    return sum_ND, y_ND, scale_N.unsqueeze(1)


def rms_norm_backward(
    dsum_ND: Tensor | None, dy_ND: Tensor, sum_ND: Tensor, weight_D: Tensor, scale_N1: Tensor
) -> tuple[Tensor, Tensor, None]:
    """See plain.rms_norm_backward; the weight's gradient is rounded to the weight's dtype."""
    dx_ND, dweight_D = _extension("norm").rms_backward_affine(
        dy_ND.contiguous(), scale_N1.squeeze(1), sum_ND, weight_D.shape, weight_D, 0.0, False
    )
    return dx_ND if dsum_ND is None else dx_ND.add_(dsum_ND), dweight_D, None


def layer_norm(
    x_ND: Tensor, branch_ND: Tensor | None, weight_D: Tensor, bias_D: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See plain.layer_norm; the addition is a separate pass."""
    sum_ND = x_ND if branch_ND is None else x_ND + branch_ND
    y_ND, mean_N, scale_N = _extension("norm").forward_affine(sum_ND, weight_D.shape, weight_D, bias_D, epsilon)
    return sum_ND, y_ND, mean_N.unsqueeze(1), scale_N.unsqueeze(1)


def layer_norm_backward(
    dsum_ND: Tensor | None, dy_ND: Tensor, sum_ND: Tensor, weight_D: Tensor, mean_N1: Tensor, scale_N1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See plain.layer_norm_backward; gradients of weight and bias are rounded to the weight's dtype."""
    like_bias = weight_D  # the kernel only uses its shape and dtype
    dx_ND, dweight_D, dbias_D = _extension("norm").backward_affine(
        dy_ND.contiguous(), mean_N1.squeeze(1), scale_N1.squeeze(1), sum_ND, weight_D.shape, weight_D, like_bias, 0.0,
        False,
    )  # fmt: skip
    return dx_ND if dsum_ND is None else dx_ND.add_(dsum_ND), dweight_D, dbias_D


def adamw_(state: AdamState, gradient: Tensor, numbers: Tensor, applied: Tensor, constants: AdamConstants) -> None:
    """See plain.adamw_; one pass over memory. A scheduled weight decay is read from the device."""
    weight, first, second, parameter = state
    beta1, beta2, epsilon, decay = constants
    step: AdamStep[Tensor] = AdamStep(*numbers.split(1))  # tensors of one element
    _extension("optimizer").multi_tensor_fused_adam_capturable(
        CHUNK,
        (~applied).int().view(1),  # 1: do nothing
        [[weight], [first], [second], [gradient], [weight if parameter is None else parameter]],
        step.factor.contiguous(),
        step.rate.contiguous(),
        beta1,
        beta2,
        epsilon,
        step.steps.int(),
        ADAMW_MODE,
        1,  # correct the bias
        float(decay),
    )


def add_product(target: Tensor, dy_NO: Tensor, *, x_NI: Tensor, overwrite: bool = False) -> None:
    """See plain.add_product; it cannot overwrite, so the target is cleared first."""
    if overwrite:
        target.zero_()
    _extension("weight_gradient").wgrad_gemm_accum_fp32(x_NI.contiguous(), dy_NO.contiguous(), target)
