"""Use of the hardware: model FLOP utilization, and the peak memory of a rank.

Utilization (MFU, Chowdhery et al. 2022) counts the model's own floating-point operations, `Plan.flops_per_token`,
without recomputation, relative to the dense peak of the device for the run's number format as its vendor states it; it
is unknown for devices and formats that are not in the table, such as CPUs.
"""

from __future__ import annotations

import resource
import sys

import torch

from trainer.plan.devices import device_named
from trainer.plan.plan import Plan

HALF = ("bf16", "fp16")


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense FLOP/s of a device for products in a number format; None if unknown."""
    if dtype not in HALF:
        return None
    device = device_named(device_name)
    return None if device is None else device.flops


class Usage:
    """One rank's use of its device.

    Args:
        plan: of the run. dtype: precision.dtype. device: this rank's.
    """

    def __init__(self, plan: Plan, dtype: str, *, device: torch.device) -> None:
        self._device, self._flops_per_token = device, plan.flops_per_token / plan.world_size
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self._peak = peak_flops(name, dtype)

    def tflops(self, tokens_per_s: float) -> float:
        """The model's 10^12 operations per second of each rank, at this many tokens per second of the run."""
        return tokens_per_s * self._flops_per_token / 1e12

    def mfu(self, tokens_per_s: float) -> float | None:
        """Model FLOP utilization of all ranks' devices at this many tokens per second of the run; None: unknown."""
        return None if self._peak is None else tokens_per_s * self._flops_per_token / self._peak

    def memory_bytes(self) -> int:
        """Peak memory so far: of tensors on a GPU, otherwise of the whole process."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
