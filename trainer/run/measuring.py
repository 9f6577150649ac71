"""The measurements of a step: its line in metrics.jsonl, and the values shown by the progress display.

Losses by component of the blend come from the same sums over ranks as the loss of the step; a blend of one component
has none. Speed and use of the device are measured over the steps since the last line.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from trainer.plan.plan import Plan
from trainer.run.engine import Engine
from trainer.run.rate import Rate
from trainer.run.step_report import StepReport
from trainer.run.usage import Usage


class Measuring:
    """The measurements of a run on one rank.

    Args:
        plan: of the run. engine: of the rank. dtype: precision.dtype. components: names of the blend's components.

    Attributes:
        rate: of the steps; the loop marks their beginnings and ends.
        components: those whose losses are measured; empty if there is only one.
    """

    def __init__(self, plan: Plan, engine: Engine, *, dtype: str, components: Sequence[str]) -> None:
        self.rate, self._engine = Rate(), engine
        self._usage = Usage(plan, dtype, device=engine.world.device)
        self._used: dict[str, float] = {}  # of the last line
        self.components = tuple(components) if len(components) > 1 else ()

    def line(self, consumed_samples: int, report: StepReport) -> dict[str, Any]:
        """The line of metrics.jsonl, without evaluation losses."""
        tokens_per_s, data_wait = self.rate.take()
        mfu, memory = self._usage.mfu(tokens_per_s), self._usage.memory_bytes()
        self._used = ({} if mfu is None else {"mfu": mfu}) | {"memory": memory}
        by_component = self._losses(report)
        return {
            "consumed_samples": consumed_samples,
            "loss": report.loss if report.num_tokens else None,
            **({"train": by_component} if by_component else {}),
            "grad_norm": report.grad_norm if report.num_tokens else None,
            "lr": report.learning_rate,
            "weight_decay": report.weight_decay,
            **({"loss_scale": report.loss_scale} if self._engine.scaler else {}),
            "tokens_per_s": tokens_per_s,
            "tflops": self._usage.tflops(tokens_per_s),
            "mfu": mfu,
            "memory_bytes": memory,
            "data_wait": data_wait,
            "time_s": time.time(),
        }

    def shown(self, step: int, report: StepReport) -> dict[str, float]:
        """The values that the progress display shows beside tokens per second."""
        lr, norm = report.learning_rate, report.grad_norm
        return {"step": step, "loss": report.loss, "lr": lr, "grad_norm": norm, **self._used}

    def _losses(self, report: StepReport) -> dict[str, float]:
        """Losses of the components from which the step read tokens with loss."""
        known = zip(self.components, report.component_losses, strict=True)
        return {name: loss for name, loss in known if not math.isnan(loss)}
