"""Chooses the implementation of each small operation of a run.

`plain.py` defines what each operation computes. On a GPU the pointwise ones are the same
functions compiled by torch.compile, one by one: fused into one or two passes over memory, with the plain function as
twin. On a CPU they are PyTorch's own kernels if it has some (library.py). The section [kernels] may name another
implementation for a group of operations; one from another library (transformer_engine.py, apex.py) is compared with the
plain one first (self_test.py), and refused if it differs. A model gets one `Kernels` and never asks what device it is
on.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mdata import UsageError
from mdata.errors import install_command
from trainer.config.sections import KernelsSection
from trainer.kernels import (
    apex,
    chunk_attention,
    expert_rows,
    few_rows,
    float8,
    gpu,
    library,
    mamba_ssm,
    paged_attention,
    plain,
    scan,
    transformer_engine,
    triton_scan,
)
from trainer.kernels.scan import ScanSizes
from trainer.kernels.self_test import (
    SCAN,
    differences,
    float8_differences,
    float8_grouped_differences,
    float8_rows_differences,
)

Kernel = Callable[..., Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """One implementation of each operation of plain.py.

    Args:
        chunk_kernel: of attention that communicates meanwhile (layers/context_attention.py), where it fits; elsewhere
            `attention` gets keys of whole rows.
    """

    rms_norm: Kernel = plain.rms_norm
    rms_norm_backward: Kernel = plain.rms_norm_backward
    layer_norm: Kernel = plain.layer_norm
    layer_norm_backward: Kernel = plain.layer_norm_backward
    swiglu: Kernel = plain.swiglu
    swiglu_backward_: Kernel = plain.swiglu_backward_
    gated: Kernel = plain.gated
    gated_backward_: Kernel = plain.gated_backward_
    split_heads: Kernel = plain.split_heads
    join_heads_: Kernel = plain.join_heads_
    rotate: Kernel = plain.rotate
    attention: Kernel = plain.attention
    chunk_kernel: type[chunk_attention.AttentionKernel] | None = None
    document_attention: Kernel = plain.document_attention
    padded_attention: Kernel = plain.padded_attention
    scored_attention: Kernel = plain.scored_attention
    bias_mask: Kernel = plain.bias_mask
    paged_attention: Kernel = plain.paged_attention
    ragged_attention: Kernel = plain.ragged_attention
    dropout: Kernel = plain.dropout
    logit_statistics: Kernel = plain.logit_statistics
    logits_to_gradient_: Kernel = plain.logits_to_gradient_
    adamw_: Callable[[plain.AdamState, Tensor, Tensor, Tensor, plain.AdamConstants], None] = plain.adamw_
    sgd_: Callable[[plain.SgdState, Tensor, Tensor, Tensor, plain.SgdConstants], None] = plain.sgd_
    muon_momentum_: Kernel = plain.muon_momentum_
    muon_apply_: Kernel = plain.muon_apply_
    orthogonalize: Kernel = plain.orthogonalize
    add_product: Kernel = plain.add_product
    weigh: Kernel = plain.weigh
    weigh_backward: Kernel = plain.weigh_backward
    weigh_swiglu: Kernel = plain.weigh_swiglu
    weigh_swiglu_backward: Kernel = plain.weigh_swiglu_backward
    take_rows: Kernel = plain.take_rows
    sum_slots: Kernel = plain.sum_slots
    grouped_product: Kernel = plain.grouped_product
    add_grouped_product: Kernel = plain.add_grouped_product
    causal_conv: Kernel = scan.causal_conv
    step_sizes: Kernel = scan.step_sizes
    gated_norm: Kernel = scan.gated_norm
    chunk_scan: Kernel = scan.chunk_scan


PLAIN = Kernels()
LIBRARY = Kernels(
    layer_norm=library.layer_norm,
    layer_norm_backward=library.layer_norm_backward,
    swiglu_backward_=library.swiglu_backward_,
    logits_to_gradient_=library.logits_to_gradient_,
    adamw_=library.adamw_,
    sgd_=library.sgd_,
)
TRANSFORMER_ENGINE = Kernels(
    rms_norm=transformer_engine.rms_norm,
    rms_norm_backward=transformer_engine.rms_norm_backward,
    layer_norm=transformer_engine.layer_norm,
    layer_norm_backward=transformer_engine.layer_norm_backward,
    attention=transformer_engine.attention,
)
APEX = Kernels(
    rms_norm=apex.rms_norm,
    rms_norm_backward=apex.rms_norm_backward,
    layer_norm=apex.layer_norm,
    layer_norm_backward=apex.layer_norm_backward,
    adamw_=apex.adamw_,
    add_product=apex.add_product,
)
MAMBA_SSM = Kernels(causal_conv=mamba_ssm.causal_conv, chunk_scan=mamba_ssm.chunk_scan, gated_norm=mamba_ssm.gated_norm)
TRITON = Kernels(
    causal_conv=triton_scan.causal_conv, chunk_scan=triton_scan.chunk_scan, gated_norm=triton_scan.gated_norm
)
# Key of the section [kernels] -> the operations that it decides. Documents and options of scores are not among them:
# only gpu.py implements those.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "norm": ("rms_norm", "rms_norm_backward", "layer_norm", "layer_norm_backward"),
        "activation": ("swiglu", "swiglu_backward_", "gated", "gated_backward_"),
        "rope": ("split_heads", "join_heads_", "rotate"),
        "attention": ("attention", "chunk_kernel"),
        "loss": ("logit_statistics", "logits_to_gradient_"),
        "optimizer": ("adamw_", "sgd_"),
        "scan": ("causal_conv", "chunk_scan", "gated_norm"),
        "weight_gradient": ("add_product",),
    }
)
# Calls into a library, or operations with a separate file for GPUs.
NOT_COMPILED = (
    "attention",
    "chunk_kernel",
    "document_attention",
    "padded_attention",
    "scored_attention",
    "bias_mask",
    "paged_attention",
    "ragged_attention",
    "orthogonalize",
    "add_product",
    "weigh_swiglu",
    "weigh_swiglu_backward",
    "take_rows",
    "grouped_product",
    "add_grouped_product",
    "chunk_scan",
)
# Computed from the stored sum; otherwise the first pass would normalize the sum before it was rounded.
ROUNDED = ("rms_norm", "layer_norm")
# Ranks with a copy of the same weights must update them alike. Inductor times two block sizes of a pointwise kernel in
# each process, and a b + c d is fused differently in the two, so copies drifted apart by units in the last place.
UPDATES = ("adamw_", "sgd_")


@functools.cache
def compiled() -> Kernels:
    """The pointwise operations, compiled at their first call for the shapes of that call."""
    names = [field.name for field in dataclasses.fields(Kernels) if field.name not in NOT_COMPILED]
    options: dict[str, dict[str, Any]] = {name: {"emulate_precision_casts": True} for name in ROUNDED}
    options |= {name: {"triton.autotune_pointwise": False} for name in UPDATES}
    made = {name: torch.compile(getattr(PLAIN, name), options=options.get(name)) for name in names}
    return Kernels(
        attention=chunk_attention.attention,
        chunk_kernel=chunk_attention.CuDnn,
        document_attention=gpu.document_attention,
        padded_attention=gpu.padded_attention,
        scored_attention=gpu.scored_attention,
        bias_mask=gpu.bias_mask,
        paged_attention=paged_attention.paged_attention,
        ragged_attention=gpu.ragged_attention,
        weigh_swiglu=expert_rows.weigh_swiglu,
        weigh_swiglu_backward=expert_rows.weigh_swiglu_backward,
        take_rows=expert_rows.take_rows,
        grouped_product=gpu.grouped_product,
        add_grouped_product=gpu.add_grouped_product,
        **made,
    )


def choose_kernels(
    device: torch.device, dtype: torch.dtype, wanted: KernelsSection | None = None, *, scans: ScanSizes | None = None
) -> Kernels:
    """The kernels that `wanted` names, tested; otherwise the fastest ones.

    The fastest are compiled ones on a GPU; on a CPU PyTorch's own if it has them, but the plain ones for 16-bit
    activations. `scans`: sizes of the model's mixers, whose fastest scan on a GPU is that of triton_scan.py; None: no
    mixers.

    Raises:
        UsageError: a named kernel is not available, or computes something else.
    """
    if device.type == "cuda":
        chosen = compiled()
    else:
        chosen = LIBRARY if device.type == "cpu" and dtype in (torch.float32, torch.float64) else PLAIN
    if scans is not None and device.type == "cuda" and (wanted is None or wanted.scan == "auto"):
        chosen = _with_fastest_scan(chosen, device, dtype, scans)
    for group, name in dataclasses.asdict(wanted or KernelsSection()).items():
        if name != "auto" and group in GROUPS:  # tensor_parallel belongs to the layers
            named = _implementation(group, name, device=device, dtype=dtype, sizes=scans or SCAN)
            chosen = dataclasses.replace(chosen, **{each: getattr(named, each) for each in GROUPS[group]})
    return chosen


def _with_fastest_scan(kernels: Kernels, device: torch.device, dtype: torch.dtype, sizes: ScanSizes) -> Kernels:
    """With a scan that computes the same as the plain one, whose speed a warning states where there is none."""
    reasons = []
    for named, reason in ((TRITON, triton_scan.missing(device, sizes)), (MAMBA_SSM, mamba_ssm.missing(device))):
        reason = reason or ("it does not support fp64" if dtype == torch.float64 else "")
        if not (reason := reason or differences("scan", named, device=device, dtype=dtype, sizes=sizes)):
            return dataclasses.replace(kernels, **{each: getattr(named, each) for each in GROUPS["scan"]})
        reasons.append(reason)
    slow = "mixers run on plain PyTorch in fp32, without Tensor Cores; with scan, convolution and norm plain a hybrid"
    slow += " of 8 layers trained at 44 % of the speed on an H200"
    warnings.warn(f"{slow}: {'; '.join(reasons)} ({mamba_ssm.INSTALL})", RuntimeWarning, stacklevel=3)
    return kernels


def _implementation(group: str, name: str, *, device: torch.device, dtype: torch.dtype, sizes: ScanSizes) -> Kernels:
    if name == "compiled":
        if device.type != "cuda":
            raise _refused(group, name, "it runs on GPUs only")
        return compiled()
    if name in ("plain", "library"):
        return PLAIN if name == "plain" else LIBRARY
    named, reason = TRANSFORMER_ENGINE, transformer_engine.missing(device)
    if name == "apex":
        named, reason = APEX, apex.missing(group, device)
    if name == "mamba_ssm":
        named, reason = MAMBA_SSM, mamba_ssm.missing(device)
    if name == "triton":
        named, reason = TRITON, triton_scan.missing(device, sizes)
    if dtype == torch.float64:
        reason = reason or "it does not support fp64"
    if reason := reason or differences(group, named, device=device, dtype=dtype, sizes=sizes):
        raise _refused(group, name, reason)
    return named


def _refused(group: str, name: str, reason: str) -> UsageError:
    return UsageError(f'kernels.{group}="{name}" cannot be used: {reason}; set kernels.{group}="auto"')


def float8_kernels(device: torch.device, *, blocks: bool = False) -> tuple[Kernel, Kernel]:
    """The kernels for rounding to FP8 and for FP8 products: Transformer Engine's on a GPU, otherwise the plain ones.

    A rehearsal's tensors are on "meta", where the plain ones compute shapes.

    Args:
        blocks: whether blocks have scales of their own.

    Raises:
        UsageError: the GPU has no FP8, or the library is missing or computes something else.
    """
    if device.type != "cuda":
        return float8.float8_quantize, float8.float8_product
    kernels = transformer_engine.float8_quantize, transformer_engine.float8_product
    missing = transformer_engine.float8_missing(device)
    if reason := missing or float8_differences(*kernels, device=device, blocks=blocks):
        raise UsageError(
            f"precision.fp8 needs {transformer_engine.NAME} and a GPU with FP8, but {reason}; "
            f'install it ({install_command("gpu")}), or set precision.fp8="none"'
        )
    return kernels


def float8_rows_kernels(device: torch.device) -> tuple[Kernel, Kernel, Kernel | None]:
    """The kernels for rows in FP8 and their products: PyTorch's on a GPU, otherwise the plain ones; and for few rows.

    Raises:
        UsageError: the GPU has no FP8, or PyTorch's product computes something else.
    """
    if device.type != "cuda":
        return float8.float8_rows, float8.float8_rows_product, None
    kernels = torch.compile(float8.float8_rows), float8.scaled_mm_rows_product
    capability = torch.cuda.get_device_capability(device)
    reason = "" if capability >= (8, 9) else f"{torch.cuda.get_device_name(device)} has none"
    if reason := reason or float8_rows_differences(*kernels, device=device):
        raise UsageError(
            f"weights in FP8 need a GPU with FP8 products (compute capability 8.9 or higher): {reason}",
            fix="leave out --weights fp8",
        )
    return *kernels, few_rows.few_rows_product if few_rows.works(device) else None


def float8_grouped_kernel(device: torch.device) -> Kernel:
    """The kernel for products of experts whose weights are rows in FP8: PyTorch's on a GPU where its trial is equal."""
    if device.type != "cuda":
        return float8.float8_rows_grouped_product
    product = functools.partial(gpu.float8_grouped_product, quantize=torch.compile(float8.float8_rows))
    return gpu.widened_grouped_product if float8_grouped_differences(product, device=device) else product
