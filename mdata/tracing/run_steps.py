"""Which step, rank and microbatch reads a sample: the sampler's arithmetic, backwards.

Steps are counted from 1, as in metrics.jsonl: step s is the s-th update. A run whose global batch or number of ranks
changed between two starts is a list of spans, each with its own sizes. A tracer uses `Steps` for samples that are read
in order, `CyclicSteps` for Megatron's random sampler, `EvaluationSteps` for validation and test sets. Run folders are
read in mdata/tracing/run_folder.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mdata.errors import UsageError, counted
from mdata.loader.batch_sizes import BatchSizes
from mdata.loader.sampler import global_batch
from mdata.util.arrays import Int64s

LARGEST_SAMPLE = 1 << 62


@dataclass(frozen=True, kw_only=True)
class StepSpan:
    """The steps of one start of a run.

    Args:
        sizes: of global batches, by consumed samples.
        steps_before, samples_before: done before the span.
        micro_batch, dp_size: rows of a forward pass, data-parallel ranks; None if unknown.
    """

    sizes: BatchSizes
    steps_before: int = 0
    samples_before: int = 0
    micro_batch: int | None = None
    dp_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class StepPlace:
    """Where a sample was read: step (from 1), row of the global batch, and the rank that has that row."""

    step: int
    row: int
    dp_rank: int | None = None
    microbatch: int | None = None


class Steps:
    """The steps of a run.

    Args:
        spans: at least one, ascending. The first may begin later than with the run: what was before is unknown.
        seed: of the run; it keys the rows of a global batch.
        in_order: rows are in the order of the samples (Megatron's order), not permuted.
        total: steps of the whole run; None: endless.

    Attributes:
        consecutive: whether samples are read once each, in their order.
        verb, batch_text: words for a step and for all of its rows, in messages.
    """

    consecutive = True
    verb = "step"
    batch_text = "its global batch"

    def __init__(
        self, spans: Sequence[StepSpan], *, seed: int, in_order: bool = False, total: int | None = None
    ) -> None:
        assert spans, "a run has steps"
        self.spans, self.total = tuple(spans), total
        self._seed, self._in_order = seed, in_order
        self._starts = [self._walk(span) for span in self.spans]
        self._rows = lru_cache(maxsize=16)(self._make_rows)

    @property
    def num_samples(self) -> int | None:
        """Samples of the whole run; None if endless."""
        if self.total is None:
            return None
        first = self.spans[0]
        return sum(self._bounds(self.total)) if self.total > first.steps_before else first.samples_before

    def bounds(self, step: int) -> tuple[int, int]:
        """(first sample, number of samples) of a step.

        Raises:
            UsageError: the run has no such step.
        """
        if step < 1 or (self.total is not None and step > self.total):
            raise UsageError(
                f"the run has no step {step}",
                found=counted(self.total, "step") if self.total is not None else None,
                expected="steps from 1 on, as metrics.jsonl counts them",
            )
        if step <= (unknown := self.spans[0].steps_before):
            raise UsageError(
                f"nothing is recorded of step {step}", found=f"steps from {unknown + 1} on", expected="one of these"
            )
        first, size = self._bounds(step)
        if first + size >= LARGEST_SAMPLE:
            raise UsageError(f"the run has no step {step}", found=f"sample {first}", expected="samples below 2^62")
        return first, size

    def step_of(self, sample: int) -> int:
        """The step that reads a sample."""
        number = bisect_right(self.spans, sample, key=lambda span: span.samples_before) - 1
        span, starts = self.spans[number], self._starts[number]
        place = bisect_right(starts, sample) - 1
        if place == len(starts) - 1:
            place += (sample - starts[-1]) // span.sizes.at(starts[-1])
        return span.steps_before + place + 1

    def rows(self, step: int) -> Int64s:
        """The samples of a step in the order of the global batch's rows: int64[n]."""
        return self._rows(*self.bounds(step))

    def rank_rows(self, step: int, dp_rank: int) -> Int64s:
        """The rows of one rank, if ranks are known: a run of rows of each microbatch.

        Raises:
            UsageError: the rows are not whole microbatches.
        """
        (_, size), (micro_batch, dp_size) = self.bounds(step), self.batch_shape(step)
        assert micro_batch is not None and dp_size is not None, "ranks are not known"
        if size % (micro_batch * dp_size):
            raise UsageError(
                f"the rows of step {step} are not whole microbatches of every rank",
                found=f"{counted(size, 'row')}, {counted(dp_size, 'rank')} along dp, microbatches of {micro_batch}",
                expected=f"a multiple of {micro_batch} x {dp_size} = {counted(micro_batch * dp_size, 'row')}",
                fix="--micro-batch and --dp of the training",
            )
        rows: Int64s = np.arange(size).reshape(-1, dp_size, micro_batch)[:, dp_rank].reshape(-1)
        return rows

    def sample_at(self, position: int) -> int:
        """The sample at a position; samples are read in the order of their numbers, except within a step."""
        return position

    def places(self, sample: int, until_step: int | None = None) -> Iterator[StepPlace]:
        """All places of a sample up to a step, in ascending order: at most one here."""
        if sample < self.spans[0].samples_before:
            return
        place = self.place(sample)
        if until_step is None or place.step <= until_step:
            yield place

    def place(self, sample: int) -> StepPlace:
        """The place of a sample: step, row and rank."""
        step = self.step_of(sample)
        first, size = self._bounds(step)
        row = sample - first if self._in_order else int(np.flatnonzero(self._rows(first, size) == sample)[0])
        return self.place_at(step, row)

    def place_at(self, step: int, row: int) -> StepPlace:
        """The place of a row of a step."""
        micro_batch, dp_size = self.batch_shape(step)
        if micro_batch is None or dp_size is None:
            return StepPlace(step=step, row=row)
        microbatch, dp_rank = divmod(row // micro_batch, dp_size)
        return StepPlace(step=step, row=row, dp_rank=dp_rank, microbatch=microbatch)

    def batch_shape(self, step: int) -> tuple[int | None, int | None]:
        """(rows of a microbatch, data-parallel ranks) of a step; None if unknown."""
        span = self.spans[self._span(step)]
        return span.micro_batch, span.dp_size

    def _span(self, step: int) -> int:
        return bisect_right(self.spans, step - 1, key=lambda span: span.steps_before) - 1

    def _bounds(self, step: int) -> tuple[int, int]:
        number = self._span(step)
        span, starts = self.spans[number], self._starts[number]
        inside = step - 1 - span.steps_before
        if inside < len(starts) - 1:
            return starts[inside], starts[inside + 1] - starts[inside]
        size = span.sizes.at(starts[-1])
        return starts[-1] + (inside - len(starts) + 1) * size, size

    def _walk(self, span: StepSpan) -> list[int]:
        """The first samples of a span's steps, up to the step from which the size is constant."""
        starts, settled = [], max(span.sizes.until or 0, span.sizes.table[-1][0])
        for first, _ in span.sizes.steps(span.samples_before):
            starts.append(first)
            if first > settled or len(span.sizes.table) == 1:
                return starts
        raise AssertionError("steps have no end")

    def _make_rows(self, first: int, size: int) -> Int64s:
        return np.arange(first, first + size) if self._in_order else global_batch(first, size, seed=self._seed)
