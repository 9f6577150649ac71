"""The report of a step: numbers stay on the device until they are read, so that a GPU need not wait for the host.

`PendingReport` is made when a step is started and holds tensors; `StepReport` is made when the report is read and holds
Python numbers. `SkippedSteps` counts reports of steps that changed nothing: too many in a row end a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from mdata import UsageError
from mdata.errors import counted

MAX_SKIPPED = 10  # consecutive steps without a finite gradient norm, or without a token that has loss


class Votes(NamedTuple):
    """The requests of a rank to all ranks, sent with a step, 1 or 0 each; in a report: their sums.

    Args:
        save: a checkpoint is due by its clock; from 2 on: the run ends by rank 0's (end_time.py). sigterm, ctrl_c: it
            received them. save_failed: it could not write its part of a checkpoint. end: a callback ends the run; sent
            only where there are callbacks.
    """

    save: float = 0.0
    sigterm: float = 0.0
    ctrl_c: float = 0.0
    save_failed: float = 0.0
    end: float = 0.0


class SpikeLimits(NamedTuple):
    """Loss and gradient norm above which a step is a spike (spike_detector.py)."""

    loss: float = math.inf
    grad_norm: float = math.inf


_NO_VOTES = Votes()
NO_LIMITS = SpikeLimits()


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step, over all ranks.

    Args:
        loss: mean over the step's loss tokens, nats per token; NaN without any. num_tokens: those tokens.
        grad_norm: before clipping.
        applied: False if the step was skipped: the norm is not finite (as it is without loss tokens), or under
            spikes.action = "skip" a number is above its limit.
        limits: of the loss and the norm. excluded: all samples are in data.skip, so that nothing was computed.
        votes: sums over all ranks.
        component_losses: for each component of the blend, like loss; empty if not requested.
        named_losses: of losses beside that of the labels, their means by name; they are not part of `loss`.
        counts: what stages counted beside losses, by name.
        learning_rate, weight_decay, loss_scale: used in the step.
        params_norm, num_zeros: of all parameters after the step, and of its gradients; None: not measured.
        group_squares: this rank's part of the squared gradient norm by group of parameters; empty if not asked for.
    """

    loss: float
    num_tokens: int
    grad_norm: float
    applied: bool
    votes: Votes = _NO_VOTES
    learning_rate: float = 0.0
    weight_decay: float = 0.0
    loss_scale: float = 1.0
    component_losses: tuple[float, ...] = ()
    named_losses: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, Sequence[float]] = field(default_factory=dict)
    params_norm: float | None = None
    num_zeros: int | None = None
    limits: SpikeLimits = NO_LIMITS
    group_squares: tuple[float, ...] = ()
    excluded: bool = False

    @property
    def above_limits(self) -> bool:
        """Whether it is a spike; under spikes.action = "skip" the device decides by the same comparison."""
        return self.loss > self.limits.loss or self.grad_norm > self.limits.grad_norm


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """The argument of callbacks of `train` after each step, the same on all ranks.

    Args:
        step: steps of the run that are finished, with this one. consumed_samples: training samples read.
        report: of the step. losses: of its evaluation, by split ("valid", "test") and set, and
            other numbers ("accuracy", "tasks"); empty if it had none.
    """

    step: int
    consumed_samples: int
    report: StepReport
    losses: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def reports_behind(device: torch.device) -> int:
    """How many steps may be started before the report of one is read, so that a GPU always has work."""
    return 1 if device.type == "cuda" else 0


Moment = float | torch.cuda.Event | None


class PendingReport:
    """The report of a step that may still be running.

    Attributes:
        sync_s: see `StepTimes` in rank_times.py; known when the report is read, and 0.0 on a single rank.

    Args:
        numbers: fp64 on the device: norm, applied, loss scale, totals of the microbatches, votes, squares.
        rates: learning rate and weight decay of the step. limits: of the step.
        num_components: number of components with losses in the totals. loss_names: of named losses in them. counts:
            name -> how many numbers follow these.
        measured: whether the norm of the parameters and the number of zero gradients are behind them.
        sync: the moments between which the rank waited for others.
        num_groups: groups of parameters whose squares are behind the votes.
    """

    def __init__(
        self,
        numbers: Tensor,
        rates: tuple[float, float],
        *,
        num_components: int = 0,
        loss_names: tuple[str, ...] = (),
        counts: Mapping[str, int] = MappingProxyType({}),
        measured: bool = False,
        sync: tuple[Moment, Moment] = (None, None),
        limits: SpikeLimits = NO_LIMITS,
        num_groups: int = 0,
    ) -> None:
        self._loss_names, self._measured, self._sync, self.sync_s = loss_names, measured, sync, 0.0
        self._limits, self._num_groups, self._counts = limits, num_groups, counts
        self._event, self._rates, self._num_components = None, rates, num_components
        self._numbers = numbers
        if numbers.is_cuda:
            # Copied now, with an event: a later copy would also wait for the steps after this one.
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> StepReport:
        """Wait for the step and return its report."""
        if self._event is not None:
            self._event.synchronize()
        began, ended = self._sync
        if isinstance(began, float) and isinstance(ended, float):
            self.sync_s = ended - began
        elif isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
            self.sync_s = began.elapsed_time(ended) / 1e3
        grad_norm, applied, scale, loss_sum, num_tokens, *rest = self._numbers.tolist()
        *rest, norm, zeros = rest if self._measured else (*rest, 0.0, 0.0)
        count = self._num_components
        losses = tuple(map(mean, rest[:count], rest[count : 2 * count]))
        end = 2 * count + 2 * len(self._loss_names)
        named = zip(self._loss_names, rest[2 * count : end : 2], rest[2 * count + 1 : end : 2], strict=True)
        means = {name: mean(total, weight) for name, total, weight in named}
        counts = {}
        for name, length in self._counts.items():
            counts[name] = tuple(rest[end : end + length])
            end += length
        first_square = len(rest) - self._num_groups
        loss, votes = mean(loss_sum, num_tokens), Votes(*rest[end:first_square])
        return StepReport(
            loss,
            int(num_tokens),
            grad_norm,
            bool(applied),
            votes,
            *self._rates,
            scale,
            losses,
            means,
            counts,
            params_norm=norm if self._measured else None,
            num_zeros=int(zeros) if self._measured else None,
            limits=self._limits,
            group_squares=tuple(rest[first_square:]),
        )


class ExcludedStep:
    """A step whose samples are all in data.skip: nothing is computed, and nothing changes.

    Args:
        rates: learning rate and weight decay of the step. num_components: of the blend, where losses of each are
            measured.
    """

    sync_s = 0.0

    def __init__(self, rates: tuple[float, float], *, num_components: int = 0) -> None:
        self._report = StepReport(
            math.nan, 0, math.nan, False, _NO_VOTES, *rates, 1.0, (math.nan,) * num_components, excluded=True
        )

    def read(self) -> StepReport:
        """The report of a step without loss tokens."""
        return self._report


def mean(total: float, count: float) -> float:
    """The mean; NaN for a count of 0."""
    return float(total / count) if count else math.nan


def numbers_beside(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Numbers on a tensor's device and in its dtype, without waiting for the device."""
    if like.is_cuda:
        return torch.tensor(numbers, dtype=like.dtype, pin_memory=True).to(like.device, non_blocking=True)
    return torch.tensor(numbers, dtype=like.dtype, device=like.device)


class SkippedSteps:
    """How many steps in a row were skipped, and why.

    A step is skipped if its gradient norm is not finite, or if none of its tokens has loss. The first may mean that the
    run has diverged; after the second the state is as good as before. Steps skipped on purpose (data.skip, spikes) do
    not count.

    Args:
        more: skipped steps that are allowed beyond MAX_SKIPPED while the loss scale falls.
        smallest_scale: below which the loss scale does not fall.
        batch: description of a step's data, for the message of a run without loss tokens.

    Attributes:
        not_finite: consecutive steps whose gradient norm was not finite; those without loss tokens do not count.
        without_loss: consecutive steps without a token that has loss.
    """

    def __init__(self, more: int, *, smallest_scale: float, batch: str) -> None:
        self._more, self._smallest_scale, self._batch = more, smallest_scale, batch
        self.not_finite = self.without_loss = 0

    def add(self, step: int, report: StepReport) -> None:
        """Count a step.

        Raises:
            UsageError: too many steps in a row were skipped.
        """
        if report.excluded:
            return
        if report.num_tokens:
            self.not_finite = 0 if math.isfinite(report.grad_norm) else self.not_finite + 1
        self.without_loss = 0 if report.num_tokens else self.without_loss + 1
        if self.not_finite >= MAX_SKIPPED + self._more:
            text = (
                f"the gradient was not finite in {counted(self.not_finite, 'step')} in a row; the last was step {step}"
            )
            raise diverged(text, report)
        if self.without_loss >= MAX_SKIPPED:
            raise UsageError(
                f"no token counted in the loss in {counted(self.without_loss, 'step')} in a row, up to step {step}",
                found=self._batch,
                fix="look at the documents with mdata cat: a document of one token has nothing to predict",
            )

    def leaves_sound(self, report: StepReport) -> bool:
        """Whether the state after this step, the last one counted, is as good as after the last update.

        It is not if gradients are no longer finite, unless only the loss scale was too high.
        """
        if report.num_tokens == 0:
            return self.not_finite == 0
        scale_falls = self._more > 0 and report.loss_scale > self._smallest_scale
        return math.isfinite(report.grad_norm) or (scale_falls and math.isfinite(report.loss))


class DivergedError(UsageError):
    """The run has diverged, and would again from its newest checkpoint."""


def diverged(problem: str, report: StepReport) -> DivergedError:
    """The error for a run that has diverged."""
    numbers = f"loss {report.loss}, gradient norm {report.grad_norm}"
    return DivergedError(problem, found=numbers, fix="lower optimizer.lr, or continue from an older checkpoint")
