"""The measurements of a step: its line in metrics.jsonl, and the values shown by the progress display.

Losses by component of the blend come from the same sums over ranks as the loss of the step; a blend of one component
has none. Speed and use of the device are measured over the steps since the last line.

Speed: tokens per second, and the share of time spent waiting for data. Only the time inside `with rate:` counts, that
is, a step without the work after it: checkpoints and evaluations do not count. Rank 0's clock is the one recorded.

Use of the device: utilization (MFU, Chowdhery et al. 2022) counts the model's own floating-point operations,
`Plan.flops_per_token`, without recomputation, relative to the dense peak of the device for the run's number format as
its vendor states it; it is unknown for devices and formats that are not in the table, such as CPUs.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import mdata
from trainer.models.family import family_of
from trainer.plan.devices import device_named
from trainer.plan.plan import Plan
from trainer.run.engine import Engine
from trainer.run.rank_times import RankTimes, StepTimes, summary
from trainer.run.step_report import StepReport


class Measuring:
    """The measurements of a run on one rank.

    Args:
        plan: of the run. engine: of the rank. dtype: precision.dtype. components: names of the blend's components.
        ranks: of all ranks, where a watchdog exchanges them.

    Attributes:
        rate: of the steps; the loop marks their beginnings and ends.
        components: those whose losses are measured; empty if there is only one.
    """

    def __init__(
        self, plan: Plan, engine: Engine, *, dtype: str, components: Sequence[str], ranks: RankTimes | None = None
    ) -> None:
        self._ranks = ranks or RankTimes()
        self.rate, self._engine, self._plan = Rate(), engine, plan
        self._usage = DeviceUse(plan, dtype, device=engine.world.device)
        self._used: dict[str, float] = {}  # of the last line
        self.components = tuple(components) if len(components) > 1 else ()

    def line(self, consumed_samples: int, report: StepReport) -> dict[str, Any]:
        """The line of metrics.jsonl, without evaluation losses."""
        tokens_per_s, data_wait, times = self.rate.take()
        self._ranks.mine = times
        mfu, memory = self._usage.mfu(tokens_per_s), self._usage.memory_bytes()
        self._used = ({} if mfu is None else {"mfu": mfu}) | {"memory": memory}
        by_component, run = self._losses(report), self._engine.config.run
        named = {name: loss for name, loss in report.named_losses.items() if not math.isnan(loss)}
        return {
            "consumed_samples": consumed_samples,
            "consumed_tokens": consumed_samples * self._plan.sample_tokens,
            "loss": report.loss if report.num_tokens else None,
            **({"train": by_component} if by_component else {}),
            "grad_norm": report.grad_norm if report.num_tokens else None,
            "lr": report.learning_rate,
            "weight_decay": report.weight_decay,
            **({"loss_scale": report.loss_scale} if self._engine.scaler else {}),
            **({"named_losses": named} if named else {}),
            **family_of(self._engine.config).metrics(self._plan.shape, report.counts),
            **({"params_norm": report.params_norm} if run.log_params_norm else {}),
            **({"num_zeros": report.num_zeros} if run.log_num_zeros else {}),
            "step_time_s": times.step_time_s,
            "tokens_per_s": tokens_per_s,
            "tflops": self._usage.tflops(tokens_per_s),
            "mfu": mfu,
            "memory_bytes": memory,
            "data_wait": data_wait,
            **({"ranks": summary(self._ranks.ranks)} if len(self._ranks.ranks) > 1 else {}),
            "time_s": time.time(),
        }

    def shown(self, step: int, report: StepReport) -> dict[str, float]:
        """The values that the progress display shows beside tokens per second."""
        lr, norm = report.learning_rate, report.grad_norm
        return {"step": step, "loss": report.loss, "lr": lr, "grad_norm": norm, **self._used}

    def _losses(self, report: StepReport) -> dict[str, float]:
        """Losses of the components from which the step read tokens with loss."""
        named_losses = zip(self.components, report.component_losses, strict=True)
        return {name: loss for name, loss in named_losses if not math.isnan(loss)}


class Rate:
    """Tokens per second, the share of time spent waiting for data, and the time of a step, since the last `take`.

    Time between steps does not count.
    """

    def __init__(self) -> None:
        self.tokens, self.steps, self._seconds, self._waited, self._began = 0, 0, 0.0, 0.0, 0.0
        self.sync_s = 0.0  # of the steps whose reports were read
        self._taken = 0.0, 0.0, StepTimes(0.0, 0.0, 0.0)

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._began

    def wait_for(self, batches: Iterator[list[mdata.Batch]]) -> list[mdata.Batch]:
        """The next item, timed as waiting for data."""
        began = time.perf_counter()
        batch = next(batches)
        self._waited += time.perf_counter() - began
        return batch

    def take(self) -> tuple[float, float, StepTimes]:
        """(tokens per second, share of waiting, times of a step); resets the counters.

        Without a step since the last call they are those of that call: on a GPU a report is read while the next step
        runs, and after the last step there is none.
        """
        if self.steps:
            rates = (self.tokens / self._seconds, self._waited / self._seconds) if self._seconds else (0.0, 0.0)
            times = StepTimes(*(total / self.steps for total in (self._seconds, self._waited, self.sync_s)))
            self._taken = *rates, times
        self.tokens, self.steps, self._seconds, self._waited, self.sync_s = 0, 0, 0.0, 0.0, 0.0
        return self._taken


HALF = ("bf16", "fp16")


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense FLOP/s of a device for products in a number format; None if unknown."""
    if dtype not in HALF:
        return None
    device = device_named(device_name)
    return None if device is None else device.flops


class DeviceUse:
    """One rank's use of its device."""

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
