"""mamba-ssm's Triton scan and causal-conv1d's convolution behind the interface of scan.py.

Both are imported at their first use. Without causal-conv1d, for a width that it lacks, and behind tokens of before, our
Triton convolution computes, and the gated norm is ours too. Steps and decays stay in fp32; results have the dtype of
the activations.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from trainer.kernels import scan, triton_scan

NAME = "mamba-ssm"
INSTALL = "pip install mamba-ssm causal-conv1d"
WIDTHS = (2, 3, 4)  # of causal-conv1d
CHANNELS = 8  # of which it needs a multiple where documents are told apart


def missing(device: torch.device) -> str:
    """Why mamba-ssm cannot serve; empty: it can."""
    if importlib.util.find_spec("mamba_ssm") is None:
        return f"{NAME} is not installed"
    return "" if device.type == "cuda" else "it runs on GPUs only"


def causal_conv(
    x_BSC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor,
    *,
    document_BS: Tensor | None = None,
    before_BKC: Tensor | None = None,
) -> Tensor:
    """See scan.causal_conv."""
    fits = weight_CK.shape[1] in WIDTHS and (document_BS is None or x_BSC.shape[2] % CHANNELS == 0)
    if before_BKC is not None or not fits or importlib.util.find_spec("causal_conv1d") is None:
        ours = triton_scan if x_BSC.is_cuda else scan
        return ours.causal_conv(x_BSC, weight_CK, bias_C, document_BS=document_BS, before_BKC=before_BKC)
    convolve = _function("causal_conv1d", "causal_conv1d_fn")
    seq_idx = None if document_BS is None else document_BS.to(torch.int32).contiguous()
    y_BCS: Tensor = convolve(x_BSC.transpose(1, 2), weight_CK, bias_C, seq_idx=seq_idx, activation="silu")
    return y_BCS.transpose(1, 2)


def gated_norm(
    y_BSHP: Tensor, x_BSHP: Tensor, z_BSF: Tensor, D_H: Tensor, weight_F: Tensor, *, groups: int, epsilon: float
) -> Tensor:
    """See scan.gated_norm; our own, because the library's does not add D x."""
    ours = triton_scan if z_BSF.is_cuda else scan
    return ours.gated_norm(y_BSHP, x_BSHP, z_BSF, D_H, weight_F, groups=groups, epsilon=epsilon)


def chunk_scan(
    x_BSHP: Tensor,
    delta_BSH: Tensor,
    A_H: Tensor,
    B_BSGN: Tensor,
    C_BSGN: Tensor,
    *,
    chunk: int,
    document_BS: Tensor | None = None,
    state_BHPN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See scan.chunk_scan."""
    run = _function("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined")
    seq_idx = None if document_BS is None else document_BS.to(torch.int32).contiguous()
    y_BSHP, state = run(
        x_BSHP,
        delta_BSH,
        A_H,
        B_BSGN,
        C_BSGN,
        chunk_size=chunk,
        initial_states=state_BHPN,
        seq_idx=seq_idx,
        return_final_states=True,
    )
    return y_BSHP, state


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
