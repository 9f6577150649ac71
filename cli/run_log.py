"""The log of a training run without a terminal, as text or as JSON lines.

Rank 0 prints it to stderr: a line every `run.log_interval` steps, with evaluations, checkpoints and notes in between.
Other work, such as building the order of the data, and long evaluations report progress every 10 s.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from mdata.errors import counted

from .progress import LINE_INTERVAL_S, LineProgress

TRAIN = "train"  # the work whose steps are lines


class RunLog(LineProgress):
    """The log of a run."""

    def __init__(
        self,
        write: Callable[[str], None],
        *,
        program: str,
        format: Literal["text", "json"],
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = LINE_INTERVAL_S,
    ) -> None:
        super().__init__(write, program=program, clock=clock, interval_s=interval_s)
        self._format = format

    def measured(self, values: Mapping[str, Any]) -> None:
        """A line for a step."""
        from trainer.run.log_text import step_text

        left = self._meter.seconds_left(self._clock())
        self._last = self._clock()
        if self._format == "json":
            self._write(json.dumps({**values, "eta_s": None if left is None else round(left)}))
        else:
            self._write(step_text(values, eta_s=left))

    def note(self, text: str) -> None:
        """See `Progress`."""
        if self._format == "json":
            self._write(json.dumps({"time_s": round(time.time(), 3), "note": text}, ensure_ascii=False))
        else:
            super().note(text)

    def advance(self, amount: int, **totals: float) -> None:
        """See `Progress`; during training only long evaluations report progress."""
        if self._facts.get("doing") != TRAIN or totals.get("to_evaluate"):
            super().advance(amount, **totals)
        else:
            self._meter.advance(amount, totals, now=self._clock())

    def end(self) -> None:
        """See `Progress`; training needs no final line, the last step has one."""
        if self._facts["doing"] != TRAIN:
            super().end()

    def _say(self, now: float, *, finished: bool = False) -> None:
        if self._format == "json":
            super()._say(now, finished=finished)
            return
        meter, label, unit = self._meter, self._facts["doing"], self._facts["unit"]
        if label == TRAIN:
            self._write(f"evaluating | {counted(int(meter.totals['to_evaluate']), 'sample')} left")
            return
        from trainer.run.log_text import duration_text

        done = f"{meter.done:,}" if meter.total is None else f"{meter.done:,}/{meter.total:,}"
        left = meter.seconds_left(now)
        end = "done" if finished else "" if left is None else f"ETA {duration_text(left)}"
        self._write(" | ".join(filter(None, (label, f"{done} {unit}", end))))
