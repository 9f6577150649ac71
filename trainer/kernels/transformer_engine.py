"""NVIDIA Transformer Engine behind the interface of this room; its kernels run on NVIDIA GPUs only.

Imported at the first use: it takes seconds to load and need not be installed. Only functions that several of its
versions share are called (tested with 2.11), and every run first compares the ones it uses with the plain twins
(self_test.py).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import inspect
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.kernels.float8 import E4M3, E5M2, Blocks, Float8, Operand, Scaling

NAME = "Transformer Engine"


def missing(device: torch.device) -> str:
    """Why this library cannot be used; empty: it can."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "it is not installed"
    if device.type != "cuda":
        return "it runs on GPUs only"
    try:
        _library()
    except (ImportError, AssertionError, OSError, RuntimeError) as error:  # raised by its own checks
        return f"it does not load: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
    return ""


def float8_missing(device: torch.device) -> str:
    """Why FP8 cannot be used; empty: it can."""
    if reason := missing(device):
        return reason
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no FP8; it needs compute capability 8.9, this is {capability}"
    return ""


class _Library:
    """The parts of the library that are called."""

    def __init__(self) -> None:
        share_cudnn()
        import transformer_engine.pytorch  # noqa: F401  loads the extension that the next line imports
        import transformer_engine_torch as extension
        from transformer_engine.pytorch.cpp_extensions import general_gemm
        from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

        self.extension: Any = extension
        self.delayed, self.current, self.gemm = Float8Quantizer, Float8CurrentScalingQuantizer, general_gemm
        self.dtypes = {E4M3: extension.DType.kFloat8E4M3, E5M2: extension.DType.kFloat8E5M2}
        wide = {torch.float32: "kFloat32", torch.bfloat16: "kBFloat16", torch.float16: "kFloat16"}
        self.wide = {dtype: getattr(extension.DType, name) for dtype, name in wide.items()}
        self.storage = _storage_class()
        self.options: dict[str, Any] = {"layout": "TN"}
        if "workspace" in inspect.signature(general_gemm).parameters:  # versions before 2.9
            from transformer_engine.pytorch.module.base import get_workspace

            self.options["workspace"] = get_workspace()


def share_cudnn() -> None:
    """Make the library use the cuDNN that PyTorch has loaded, all of its parts.

    By default it prefers one from the system. Two versions in a process get mixed: loading fails with an undefined
    symbol, or PyTorch sees the older one and stops using cuDNN's attention, which cost 10 % of a step. PyTorch loads
    the parts only when it first needs them, and the library links to each of them by name; so all are loaded here.
    """
    if "CUDNN_HOME" in os.environ or "CUDNN_PATH" in os.environ:
        return
    loaded = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    if paths := [line.split(maxsplit=5)[5] for line in loaded if "/libcudnn.so" in line]:
        folder = Path(paths[0]).parent
        os.environ["CUDNN_PATH"] = str(folder)
        for part in sorted(folder.glob("libcudnn*.so.*")):
            ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _library() -> _Library:
    return _Library()


def _storage_class() -> Any:
    try:
        from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
    except ImportError:  # versions before 2.8
        from transformer_engine.pytorch.tensor._internal.float8_tensor_base import Float8TensorBase

        return Float8TensorBase
    return Float8TensorStorage


def float8_quantize(x_RC: Tensor, dtype: torch.dtype, *, scaling: Scaling, columns: bool) -> Float8:
    """See float8.float8_quantize; with a given scale one pass over x, otherwise two."""
    library = _library()
    options: dict[str, Any] = {"rowwise": True, "columnwise": columns}
    if scaling.blocks != "none":
        return _in_blocks(x_RC, dtype, scaling.blocks, options)
    if scaling.scale_1 is None:
        quantizer = library.current(library.dtypes[dtype], x_RC.device, **options)
    else:
        largest_1 = torch.zeros_like(scaling.scale_1) if scaling.largest_1 is None else scaling.largest_1
        quantizer = library.delayed(scaling.scale_1, largest_1, library.dtypes[dtype], **options)
    quantizer.internal = True
    made = quantizer(x_RC)
    if scaling.scale_1 is None and scaling.largest_1 is not None:
        torch.maximum(scaling.largest_1, quantizer.amax, out=scaling.largest_1)
    rows = Operand(made._data.view(dtype), made._scale_inv)
    return Float8(rows, Operand(made._transpose.view(dtype), made._scale_inv) if columns else None)


def _in_blocks(x_RC: Tensor, dtype: torch.dtype, blocks: Blocks, options: dict[str, Any]) -> Float8:
    """Its transpose is rounded from x too, and both have scales in the order that cuBLAS reads."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    quantizer = Float8BlockQuantizer(
        _library().dtypes[dtype], block_scaling_dim=2 if blocks == "squares" else 1, **options
    )
    quantizer.internal = True
    made = quantizer(x_RC)
    rows = Operand(made._rowwise_data.view(dtype), made._rowwise_scale_inv, blocks)
    if made._columnwise_data is None:
        return Float8(rows, None)
    return Float8(rows, Operand(made._columnwise_data.view(dtype), made._columnwise_scale_inv, blocks))


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
    """See float8.float8_product; a single cuBLAS product, which adds to `out` itself."""
    library = _library()
    result: Tensor = library.gemm(
        _stored(right, library),
        _stored(left, library),
        out_dtype=dtype if out is None else out.dtype,
        bias=bias_N,
        out=out,
        accumulate=add,
        use_split_accumulator=not fast,
        **library.options,
    )[0]
    return result


def _stored(factor: Operand, library: _Library) -> Any:
    data, dtype = factor.values_RK.view(torch.uint8), library.dtypes[factor.values_RK.dtype]
    if factor.blocks == "none":
        return library.storage(data=data, fp8_scale_inv=factor.inverse, fp8_dtype=dtype)
    from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage

    return Float8BlockwiseQTensorStorage(
        rowwise_data=data,
        rowwise_scale_inv=factor.inverse,
        columnwise_data=None,
        columnwise_scale_inv=None,
        fp8_dtype=dtype,
        quantizer=None,
        is_2D_scaled=factor.blocks == "squares",
        data_format=library.extension.Float8BlockScaleTensorFormat.GEMM_READY,
    )


def rms_norm(
    x_ND: Tensor, branch_ND: Tensor | None, weight_D: Tensor, bias_D: None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See plain.rms_norm; the addition is a separate pass."""
    sum_ND, library = x_ND if branch_ND is None else x_ND + branch_ND, _library()
    y_ND, _, scale_N = library.extension.rmsnorm_fwd(
        sum_ND, weight_D, epsilon, None, None, library.wide[x_ND.dtype], 0, False
    )
    return sum_ND, y_ND, scale_N.unsqueeze(1)


def rms_norm_backward(
    dsum_ND: Tensor | None, dy_ND: Tensor, sum_ND: Tensor, weight_D: Tensor, scale_N1: Tensor
) -> tuple[Tensor, Tensor, None]:
    """See plain.rms_norm_backward; the weight's gradient is rounded to the weight's dtype."""
    extension, scale_N = _library().extension, scale_N1.squeeze(1)
    dy_ND = dy_ND.contiguous()
    dx_ND, dweight_D = extension.rmsnorm_bwd(dy_ND, sum_ND, scale_N, weight_D, 0, False)
    return dx_ND if dsum_ND is None else dx_ND.add_(dsum_ND), dweight_D, None


def layer_norm(
    x_ND: Tensor, branch_ND: Tensor | None, weight_D: Tensor, bias_D: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See plain.layer_norm; the addition is a separate pass."""
    sum_ND, library = x_ND if branch_ND is None else x_ND + branch_ND, _library()
    y_ND, mean_N, scale_N = library.extension.layernorm_fwd(
        sum_ND, weight_D, bias_D, epsilon, None, None, library.wide[x_ND.dtype], 0, False
    )
    return sum_ND, y_ND, mean_N.unsqueeze(1), scale_N.unsqueeze(1)


def layer_norm_backward(
    dsum_ND: Tensor | None, dy_ND: Tensor, sum_ND: Tensor, weight_D: Tensor, mean_N1: Tensor, scale_N1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See plain.layer_norm_backward; gradients of weight and bias are rounded to the weight's dtype."""
    dx_ND, dweight_D, dbias_D = _library().extension.layernorm_bwd(
        dy_ND.contiguous(), sum_ND, mean_N1.squeeze(1), scale_N1.squeeze(1), weight_D, 0, False
    )
    return dx_ND if dsum_ND is None else dx_ND.add_(dsum_ND), dweight_D, dbias_D


def attention(
    q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, scale: float | None = None, ends: tuple[int, ...] | None = None
) -> Tensor:
    """See plain.attention; the library chooses cuDNN's or flash-attention's kernels."""
    assert ends is None, "mesh.cp > 1 with kernels.attention is refused by plan/check.py"
    layer = _attention_layer(q_BSHK.shape[2], k_BSGK.shape[2], q_BSHK.shape[3], scale)
    y_BSE: Tensor = layer(q_BSHK, k_BSGK, v_BSGK)
    return y_BSE.view(q_BSHK.shape)


@functools.lru_cache(maxsize=16)
def _attention_layer(heads: int, groups: int, width: int, scale: float | None) -> Any:
    _library()
    from transformer_engine.pytorch import DotProductAttention

    return DotProductAttention(
        heads, width, num_gqa_groups=groups, qkv_format="bshd", attn_mask_type="causal", softmax_scale=scale,
        attention_dropout=0.0,
    )  # fmt: skip
