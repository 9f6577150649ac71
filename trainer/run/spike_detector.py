"""Detects spikes of the loss and gradient norm: a robust z-score over a window of earlier steps.

A step is above its limits if its loss or its gradient norm lies more than `spikes.threshold` deviations above the
median of the window. The deviation is that of the values above the median, because gradient norms are skewed: the
median of their distances times 1.4826, which is the standard deviation of normal values. A spike begins with such a
step unless there was another shortly before.

What is unusual: the limits of step n follow from the reports of steps up to n - 2 alone. A GPU is given step n before
step n - 1 has been read, and a run that resumes at step n has read all reports; both must decide the same. The limits
are sums, products and comparisons of numbers that all ranks share, so they are bitwise equal on all ranks; a logarithm
could differ between two processors. The state is `to_numbers`, a part of each checkpoint. Pure.

There is no limit during learning-rate warmup or while the window is less than half full. The window is cleared when
the mixture changes, because another mixture has another loss, and after MOST_IN_A_ROW steps above the limit: that is a
new level, not a spike.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer.config.sections import SpikesSection
from trainer.run.step_report import NO_LIMITS, SpikeLimits, StepReport

BEHIND = 2  # steps between a report and the first limit that it can influence
MOST_IN_A_ROW = 10  # steps above the limit, after which their level becomes the usual one
QUIET_STEPS = 16  # after a step above the limit, in which others belong to the same spike
MIXTURE_CHANGE = 0.1  # share of samples from other components, from which on a mixture is another one
LEAST_LOSS, LEAST_NORM = 0.05, 3.0  # a spike is higher than the median by at least this share of it; norms vary more
NEIGHBOURS = 10  # steps before and after a spike in the table of its page
_NORMAL = 1.4826  # standard deviation of normal values whose median distance from the median is 1


class MeasuredStep(NamedTuple):
    """A step's numbers: whether it was above its limits, and the sample with which its mixture began."""

    step: int
    loss: float
    grad_norm: float
    above: bool
    mixture: int


@dataclass(frozen=True, slots=True)
class Spike:
    """A step that was above its limits.

    Args:
        step: its number. loss, grad_norm: its numbers. limits: of both. begins: whether it is the first of a spike.
        loss_z, norm_z: robust z-scores; None: unknown.
    """

    step: int
    loss: float
    grad_norm: float
    limits: SpikeLimits
    begins: bool
    loss_z: float | None = None
    norm_z: float | None = None

    def facts(self) -> dict[str, Any]:
        """For events.jsonl."""
        return {
            "step": self.step,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "loss_limit": self.limits.loss,
            "grad_norm_limit": self.limits.grad_norm,
            "loss_z": self.loss_z,
            "grad_norm_z": self.norm_z,
        }


@dataclass(frozen=True, kw_only=True)
class SpikeStep:
    """A spike and what its step read.

    Args:
        spike: see there. first_sample, num_samples: of its step. losses: by corpus; empty if there is only one.
        norms: of the gradient, by group of parameters. action: spikes.action.
    """

    spike: Spike
    first_sample: int
    num_samples: int
    losses: Mapping[str, float]
    norms: Mapping[str, float]
    action: str


class SpikeDetector:
    """The window of a run; every rank has one, and they agree.

    Args:
        settings: of the run. mixtures: first samples of its mixtures, see `Dataset.mixture_changes`.
    """

    def __init__(self, settings: SpikesSection, mixtures: Sequence[int] = (0,)) -> None:
        self._settings, self._mixtures = settings, mixtures
        self._window: deque[tuple[float, float]] = deque(maxlen=settings.window)
        self._mixture, self._in_a_row, self._last_above = 0, 0, -QUIET_STEPS
        self._waiting: deque[MeasuredStep] = deque()  # not yet in the window
        self._usual: dict[int, tuple[_Usual, _Usual]] = {}  # of steps whose reports are to come: loss, norm

    def limits(self, step: int, sample: int, *, warmup: bool = False) -> SpikeLimits:
        """The limits of a step; call it for each step in order.

        Args:
            sample: the first one that it reads. warmup: whether the step is in the warmup, which has no limits.
        """
        while self._waiting and self._waiting[0].step <= step - BEHIND:
            self._take(self._waiting.popleft())
        few = len(self._window) < (self._settings.window + 1) // 2
        if self._settings.action == "off" or warmup or few or self._mixture != self._mixture_at(sample):
            return NO_LIMITS
        loss, norm = map(_usual, zip(*self._window, strict=True))
        self._usual[step] = loss, norm
        threshold = self._settings.threshold
        return SpikeLimits(loss.limit(threshold, LEAST_LOSS), norm.limit(threshold, LEAST_NORM))

    def add(self, step: int, sample: int, report: StepReport) -> Spike | None:
        """Add the report of a step; returns the spike if it is above its limits.

        Args:
            sample: the first one that it read.
        """
        usual = self._usual.pop(step, None)
        if self._settings.action == "off" or not report.num_tokens:
            return None
        finite = math.isfinite(report.loss) and math.isfinite(report.grad_norm)
        if finite:
            measured = MeasuredStep(step, report.loss, report.grad_norm, report.above_limits, self._mixture_at(sample))
            self._waiting.append(measured)
        # An infinite norm under a loss scale is no spike: the scale was too high.
        if not (report.above_limits if finite else report.limits != NO_LIMITS and report.loss_scale == 1):
            return None
        begins = step - self._last_above > QUIET_STEPS
        self._last_above = step
        numbers = report.loss, report.grad_norm
        scores = [of.score(number) for of, number in zip(usual or (), numbers, strict=False)]
        return Spike(step, report.loss, report.grad_norm, report.limits, begins, *scores)

    def to_numbers(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {
            "window": [list(values) for values in self._window],
            "waiting": [list(measured) for measured in self._waiting],
            "mixture": self._mixture,
            "in_a_row": self._in_a_row,
            "last_above": self._last_above,
        }

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Continue from `to_numbers`."""
        self._window.extend((loss, norm) for loss, norm in numbers["window"])
        self._waiting.extend(MeasuredStep(*values) for values in numbers["waiting"])
        self._mixture, self._in_a_row = numbers["mixture"], numbers["in_a_row"]
        self._last_above = numbers["last_above"]

    def _take(self, measured: MeasuredStep) -> None:
        self._in_a_row = self._in_a_row + 1 if measured.above else 0
        if measured.mixture != self._mixture or self._in_a_row >= MOST_IN_A_ROW:
            self._window.clear()
            self._mixture, self._in_a_row = measured.mixture, 0
        self._window.append((measured.loss, measured.grad_norm))

    def _mixture_at(self, sample: int) -> int:
        return self._mixtures[bisect.bisect_right(self._mixtures, sample) - 1]


class _Usual(NamedTuple):
    """The median of a window, and the deviation of the values above it."""

    median: float
    deviation: float

    def limit(self, threshold: float, least: float) -> float:
        return self.median + max(threshold * self.deviation, least * abs(self.median))

    def score(self, value: float) -> float | None:
        """The robust z-score of a value; None: all values of the window are the same."""
        return (value - self.median) / self.deviation if self.deviation else None


def _usual(values: Iterable[float]) -> _Usual:
    ordered = sorted(values)
    middle = statistics.median(ordered)
    return _Usual(middle, _NORMAL * statistics.median(value - middle for value in ordered if value >= middle))
