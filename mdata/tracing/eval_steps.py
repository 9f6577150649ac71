"""The evaluations of a run's validation or test set: after which steps, which samples, on which ranks.

Every evaluation reads the same samples of a set: all of them, or `train.eval_samples` spread evenly over it, assigned
to the data-parallel ranks in turn. So a sample has as many places as there are evaluations, or none.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mdata.errors import UsageError, counted
from mdata.tracing.run_steps import StepPlace, Steps
from mdata.util.arrays import Int64s


class EvaluationSteps:
    """When a set is evaluated, and on which ranks.

    Args:
        samples: read by an evaluation, ascending: int64[n].
        run: the steps of training, with a known end.
        interval: steps between evaluations; 0: only after the last step.
    """

    consecutive = False
    verb = "evaluation after step"
    batch_text = "the evaluation"

    def __init__(self, samples: Int64s, run: Steps, *, interval: int) -> None:
        assert run.total is not None, "a run ends"
        self.samples = samples
        self.total: int | None = run.total
        self._run = run
        before = run.spans[0].steps_before  # of which nothing is recorded
        between = range(interval, run.total, interval) if interval else ()
        self._after = [*(step for step in between if step > before), run.total]
        self._every = f"every {counted(interval, 'step')} and " if interval else ""

    @property
    def num_samples(self) -> int | None:
        """None: the bound is that of the set."""
        return None

    def batch_shape(self, step: int) -> tuple[int | None, int | None]:
        """(rows of a microbatch, data-parallel ranks) after a step."""
        return self._run.batch_shape(step)

    def rows(self, step: int) -> Int64s:
        """The samples that are read after a step.

        Raises:
            UsageError: there is no evaluation after this step.
        """
        if step not in self._after:
            expected = f"{self._every}after step {self.total}"
            raise UsageError(f"nothing is evaluated after step {step}", expected=expected)
        return self.samples

    def rank_rows(self, step: int, dp_rank: int) -> Int64s:
        """The rows of one rank."""
        _, dp_size = self._run.batch_shape(step)
        assert dp_size is not None, "ranks are not known"
        return np.arange(dp_rank, len(self.rows(step)), dp_size)

    def place_at(self, step: int, row: int) -> StepPlace:
        """The rank that has a row after a step."""
        micro_batch, dp_size = self._run.batch_shape(step)
        if micro_batch is None or dp_size is None:
            return StepPlace(step=step, row=row)
        return StepPlace(step=step, row=row, dp_rank=row % dp_size, microbatch=row // dp_size // micro_batch)

    def sample_at(self, position: int) -> int:
        """The sample that an evaluation reads as number `position`.

        Raises:
            UsageError: it reads fewer.
        """
        if not 0 <= position < len(self.samples):
            raise UsageError(f"an evaluation reads no sample {position}", found=counted(len(self.samples), "sample"))
        return int(self.samples[position])

    def places(self, sample: int, until_step: int | None = None) -> Iterator[StepPlace]:
        """Where a sample is read, in ascending steps."""
        row = int(np.searchsorted(self.samples, sample))
        if row == len(self.samples) or self.samples[row] != sample:
            return
        for step in self._after:
            if until_step is not None and step > until_step:
                return
            yield self.place_at(step, row)
