"""Counts steps that changed nothing: too many in a row end a run.

A step is skipped if its gradient norm is not finite, or if none of its tokens has loss. The first may mean that the run
has diverged; after the second the state is as good as before. Steps that are skipped on purpose (data.skip, spikes) do
not count.
"""

from __future__ import annotations

import math

from mdata import UsageError
from trainer.run.step_report import StepReport

MAX_SKIPPED = 10  # consecutive steps without a finite gradient norm, or without a token that has loss


class SkippedSteps:
    """How many steps in a row were skipped, and why.

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
            text = f"the gradient was not finite in {self.not_finite} steps in a row; the last was step {step}"
            raise diverged(text, report)
        if self.without_loss >= MAX_SKIPPED:
            raise UsageError(
                f"no token counted in the loss in {self.without_loss} steps in a row; the last was step {step}",
                found=self._batch,
                fix="look at the documents with mdata cat: a document of one token has nothing to predict",
            )

    def leaves_sound(self, report: StepReport) -> bool:
        """Whether the state after this step, the last one counted, is as good as after the last update.

        It is not where gradients are no longer finite; but a loss scale that is too high says nothing of the state.
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
