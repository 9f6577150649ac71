"""Goodput: the share of a run's time that went into steps that it kept, and where the rest went.

Pure; computed from the files of all starts in the run folder: events.jsonl, metrics.jsonl, and the lines that were put
aside when the run went back (`tally_of` in metrics.py reads them). `Tally` takes events and lines in the order of their
times, so that a run can also add its own as it writes them. Steps between the last line and a kill leave no trace;
their time counts as part of the restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from mdata.errors import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Where the time of a run went, in seconds.

    Args:
        wall_s: from the beginning of its first start to the last line or event, without the time between the end of
            a finished run and the start that makes it longer.
        kept_s: in steps that were kept, without waiting for data. stall_s: waiting for data in those steps.
        lost_s: in steps that were repeated or discarded. lost_steps: their number.
        save_s: steps waited for a checkpoint.
        start_s: setting up the first start, and from the last sign of each later one to the beginning of the next's
            steps. starts: how many.
    """

    wall_s: float = 0.0
    kept_s: float = 0.0
    stall_s: float = 0.0
    lost_s: float = 0.0
    save_s: float = 0.0
    start_s: float = 0.0
    starts: int = 0
    lost_steps: int = 0

    @property
    def share(self) -> float:
        """Time in kept steps as a share of all."""
        return self.kept_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def other_s(self) -> float:
        """Evaluations, copies of checkpoints, and everything else between steps."""
        parts = self.kept_s + self.stall_s + self.lost_s + self.save_s + self.start_s
        return max(0.0, self.wall_s - parts)

    def text(self) -> str:
        """For people: "goodput 93.1 % of 2.1 h; starts 2.0 %, saves 1.2 %; 3 starts, 12 steps lost"."""
        hours, wall_s = self.wall_s / 3600, self.wall_s or 1.0
        parts = {
            "lost steps": self.lost_s,
            "starts": self.start_s,
            "saves": self.save_s,
            "waiting for data": self.stall_s,
            "other": self.other_s,
        }
        shares = ", ".join(f"{name} {part / wall_s:.1%}" for name, part in parts.items() if part / wall_s >= 0.0005)
        wall = f"{hours:.1f} h" if hours >= 1 else f"{self.wall_s / 60:.1f} min"
        starts = counted(self.starts, "start")
        lost = f"{counted(self.lost_steps, 'step')} lost"
        return f"goodput {self.share:.1%} of {wall}{f'; {shares}' if shares else ''}; {starts}, {lost}"


class _Line(NamedTuple):
    """The steps of a line of metrics.jsonl, since the line before it."""

    step: int
    samples: int
    steps_s: float
    wait_s: float


class Tally:
    """Adds up events and lines, which come in the order of their times.

    Args:
        sequence_length: of the run. background: checkpoint.background; false: steps wait for every save.
    """

    def __init__(self, sequence_length: int, *, background: bool = True) -> None:
        self._tokens_per_sample, self._background = sequence_length, background
        self._began_s: float | None = None
        self._finished = False
        self._last_s = 0.0  # of the last sign
        self._kept: list[_Line] = []
        self._samples: int | None = 0  # at the last line, or where the start began; None: not known
        self._reached = 0  # the last step of this start, as far as known
        self._sums = dict.fromkeys(("kept_s", "stall_s", "lost_s", "save_s", "start_s"), 0.0)
        self._starts = self._lost_steps = 0

    def event(self, event: Mapping[str, Any]) -> None:
        """Add a line of events.jsonl."""
        time_s, kind = float(event["time_s"]), event["event"]
        if kind == "start":
            self._start(time_s, int(event.get("step") or 0), float(event.get("setup_s") or 0.0))
        elif kind == "save waited" or (kind == "saved" and not self._background):
            self._sums["save_s"] += float(event.get("seconds") or 0.0)
        self._finished = kind == "finished" or (self._finished and kind != "start")
        self._last_s = max(self._last_s, time_s)

    def line(self, line: Mapping[str, Any]) -> None:
        """Add a line of metrics.jsonl."""
        time_s, samples = float(line["time_s"]), int(line["consumed_samples"])
        if self._began_s is None:  # the events of an older version, or none
            self._start(time_s, int(line["step"]), 0.0)
        if self._samples is None or not line.get("tokens_per_s"):
            steps_s = max(0.0, time_s - self._last_s)
        else:
            steps_s = (samples - self._samples) * self._tokens_per_sample / float(line["tokens_per_s"])
        wait_s = steps_s * float(line.get("data_wait") or 0.0)
        self._kept.append(_Line(int(line["step"]), samples, steps_s, wait_s))
        self._sums["kept_s"] += steps_s - wait_s
        self._sums["stall_s"] += wait_s
        self._samples, self._reached = samples, int(line["step"])
        self._last_s = max(self._last_s, time_s)

    def _start(self, time_s: float, step: int, setup_s: float) -> None:
        if self._began_s is None:
            self._began_s = time_s - setup_s
            self._last_s = self._began_s
        if self._finished:
            idle_s = max(0.0, time_s - setup_s - self._last_s)
            self._began_s += idle_s
            self._last_s += idle_s
        self._sums["start_s"] += max(0.0, time_s - self._last_s)
        self._lost_steps += max(0, self._reached - step)
        while self._kept and self._kept[-1].step > step:
            lost = self._kept.pop()
            self._sums["kept_s"] -= lost.steps_s - lost.wait_s
            self._sums["stall_s"] -= lost.wait_s
            self._sums["lost_s"] += lost.steps_s
        has_samples = step == 0 or (bool(self._kept) and self._kept[-1].step == step)
        self._samples = (self._kept[-1].samples if step else 0) if has_samples else None
        self._reached, self._starts = step, self._starts + 1

    def goodput(self) -> Goodput:
        """The sums up to the last event or line."""
        wall_s = 0.0 if self._began_s is None else self._last_s - self._began_s
        sums = {name: max(0.0, value) for name, value in self._sums.items()}
        return Goodput(wall_s=wall_s, **sums, starts=self._starts, lost_steps=self._lost_steps)
