"""The steps of Megatron's random sampler (`--dataloader-type cyclic`): which epoch, step and rank reads a sample.

A sample is read once per epoch or, if the number of samples is not a multiple of a step's, in some epochs not at all;
so it has many places in a run, where mdata's own order gives it one. An epoch is the sampler's permutation
(mdata/loader/megatron_sampler.py) as one array, position by position; the last few are cached, 8 bytes per sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import count

import numpy as np

from mdata.errors import UsageError, counted
from mdata.loader.megatron_sampler import SamplerArgs, torch_permutation
from mdata.tracing.run_steps import StepPlace, Steps, StepSpan
from mdata.util.arrays import Int64s

_EPOCHS_LOOKED_AT = 3


def shuffled_epoch(args: SamplerArgs, epoch: int, *, sharded: bool = True) -> Int64s:
    """The samples of an epoch on all ranks: int64[lists, ranks, micro_batch]; list l of rank r is [l, r]."""
    lists = args.total // args.group
    if sharded:
        bucket = lists * args.micro_batch
        order = torch_permutation(bucket, epoch) + np.arange(args.dp_size)[:, None] * bucket
        return order.reshape(args.dp_size, lists, args.micro_batch).transpose(1, 0, 2)
    used = args.total // args.micro_batch * args.micro_batch
    order = torch_permutation(used, epoch)[: lists * args.group]
    return order.reshape(lists, args.micro_batch, args.dp_size).transpose(0, 2, 1)


class CyclicSteps(Steps):
    """The steps of a run whose epochs are shuffled.

    Args:
        span: sizes of global batches, micro_batch and dp_size; all must be known.
        num_samples: of the dataset.
        sharded: whether every rank shuffles its own part (Megatron's default), or all shuffle together.
        total: steps of the run; None: endless.

    Raises:
        UsageError: fewer samples than one microbatch per rank, or a step that is not a multiple of this.
    """

    consecutive = False

    def __init__(self, span: StepSpan, *, num_samples: int, sharded: bool = True, total: int | None = None) -> None:
        assert span.micro_batch is not None and span.dp_size is not None, "the sampler is made for ranks"
        self._args = SamplerArgs(total=num_samples, micro_batch=span.micro_batch, dp_size=span.dp_size)
        self._args.check()
        group, odd = self._args.group, [size for _, size in span.sizes.table if size % self._args.group]
        if num_samples < group or odd:
            problem = f"a step of {odd[0]} samples cannot be split evenly over the ranks" if odd else ""
            raise UsageError(
                problem or f"{counted(num_samples, 'sample is', 'samples are')} less than a step",
                expected=f"a multiple of {span.micro_batch} x {span.dp_size} = {counted(group, 'sample')}",
                fix="--micro-batch and --dp of the training",
            )
        super().__init__([span], seed=0, in_order=True, total=total)
        self.active = num_samples - num_samples % group
        self._sharded = sharded
        self._epoch = lru_cache(maxsize=_EPOCHS_LOOKED_AT)(self._make_epoch)

    @property
    def num_samples(self) -> int | None:
        """None: any sample may be read in any epoch."""
        return None

    def rows(self, step: int) -> Int64s:
        """The samples of a step in the order of the global batch's rows: int64[n].

        Raises:
            UsageError: the run has no such step.
        """
        first, size = self.bounds(step)
        epochs = range(first // self.active, (first + size - 1) // self.active + 1)
        read = np.concatenate([self._epoch(epoch) for epoch in epochs])
        return read[first - epochs[0] * self.active :][:size]

    def sample_at(self, position: int) -> int:
        """The sample that training reads as number `position`."""
        epoch, inside = divmod(position, self.active)
        return int(self._epoch(epoch)[inside])

    def places(self, sample: int, until_step: int | None = None) -> Iterator[StepPlace]:
        """Where a sample is read, in ascending steps; if no end is given, in the first three epochs."""
        ends = [step for step in (until_step, self.total) if step is not None]
        for epoch in count() if ends else range(_EPOCHS_LOOKED_AT):
            if ends and self.step_of(epoch * self.active) > min(ends):
                return
            for inside in np.flatnonzero(self._epoch(epoch) == sample).tolist():
                position = epoch * self.active + inside
                step = self.step_of(position)
                if not ends or step <= min(ends):
                    yield self.place_at(step, position - self._bounds(step)[0])

    def _make_epoch(self, epoch: int) -> Int64s:
        return shuffled_epoch(self._args, epoch, sharded=self._sharded).reshape(-1)
