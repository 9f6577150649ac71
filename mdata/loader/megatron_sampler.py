"""Megatron's samplers: the sample numbers of each rank's microbatches, equal to Megatron's.

`sequential` (its `single`), `random` (its `cyclic`: a shuffled epoch, sharded or not) and `full_validation` are
generators of lists of numbers, from a counter of consumed samples. As in Megatron, the random order depends on the
epoch alone, not on the run's seed (F20). What differs: fewer samples than one step over all ranks are refused (there: a
division by zero); without sharding every rank gets the same number of lists (F20: there some may get one more). mdata's
own order is not here: see `mdata.loader.sampler`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mdata._core import Mersenne
from mdata.errors import UsageError, counted
from mdata.util.arrays import Int64s

# From here on torch draws otherwise.
_MOST_SHUFFLED = 2**32 // 20


@dataclass(frozen=True, kw_only=True)
class SamplerArgs:
    """What Megatron gives a sampler: the counts of samples and ranks, and which rank this is.

    Args:
        total: samples of the dataset.
        consumed: samples read before, by all ranks together.
        micro_batch: samples in a list.
        dp_rank, dp_size: this rank, and how many there are.
    """

    total: int
    consumed: int = 0
    micro_batch: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def group(self) -> int:
        """Samples in one list of every rank."""
        return self.micro_batch * self.dp_size

    def check(self) -> None:
        """Refuse impossible numbers.

        Raises:
            UsageError: names the number.
        """
        if self.micro_batch < 1 or self.dp_size < 1 or not 0 <= self.dp_rank < self.dp_size:
            raise UsageError(f"rank {self.dp_rank} of {self.dp_size}, microbatch {self.micro_batch}")
        if self.total < 1 or self.consumed < 0:
            raise UsageError(
                f"{counted(self.consumed, 'sample')} consumed of {self.total}",
                expected="0 or more consumed, of 1 or more",
            )


def sequential(args: SamplerArgs, *, drop_last: bool = True) -> Iterator[list[int]]:
    """Numbers in ascending order; an incomplete last step is dropped, or divided (some ranks may get []).

    Raises:
        UsageError: everything is consumed.
    """
    args.check()
    if args.consumed >= args.total:
        raise UsageError(f"all {args.total} samples are consumed", found=f"{args.consumed} consumed")
    return _sequential(args, drop_last)


def _sequential(args: SamplerArgs, drop_last: bool) -> Iterator[list[int]]:
    mine = args.dp_rank * args.micro_batch
    for first in range(args.consumed, args.total, args.group):
        last = min(first + args.group, args.total)
        if last - first < args.group and drop_last:
            return
        yield list(range(min(first + mine, last), min(first + mine + args.micro_batch, last)))


def random(args: SamplerArgs, *, sharded: bool = True) -> Iterator[list[int]]:
    """The rest of the shuffled epoch that contains `consumed`; each list consumes `args.group` samples.

    Raises:
        UsageError: fewer samples than a step, or a counter inside a step.
    """
    args.check()
    if args.total < args.group:
        raise UsageError(
            f"{counted(args.total, 'sample is', 'samples are')} less than one microbatch of every rank",
            expected=f"at least {args.micro_batch} x {args.dp_size} = {args.group}",
            fix="more samples, a smaller microbatch, or fewer ranks",
        )
    active = args.total - args.total % args.group
    epoch, current = divmod(args.consumed, active)
    if current % args.group:
        raise UsageError(
            f"{counted(args.consumed, 'consumed sample ends', 'consumed samples end')} inside a step of {args.group}",
            expected=f"a multiple of {args.group} within each epoch of {active}",
            fix="continue with the number of ranks and the microbatch with which the samples were consumed",
        )
    bucket = args.total // args.group * args.micro_batch
    lists = (active - current) // args.group
    if sharded:
        order = torch_permutation(bucket, epoch)[current // args.dp_size :] + args.dp_rank * bucket
    else:
        # Samples past the last whole list are in the order, so that a few of an epoch come from them.
        used = args.total // args.micro_batch * args.micro_batch
        order = torch_permutation(used, epoch)[current:][args.dp_rank :: args.dp_size]
    return (part.tolist() for part in order[: lists * args.micro_batch].reshape(lists, args.micro_batch))


def full_validation(args: SamplerArgs) -> Iterator[list[int]]:
    """Every sample once, one at a time, in turns of the ranks."""
    args.check()
    return ([number] for number in range(args.dp_rank, args.total, args.dp_size))


def torch_permutation(size: int, seed: int) -> Int64s:
    """int64[size], torch's CPU randperm with a generator of this seed.

    Raises:
        UsageError: a size at which torch draws differently.
    """
    if size >= _MOST_SHUFFLED:
        raise UsageError(
            f"a permutation of {size} samples",
            expected=f"fewer than {_MOST_SHUFFLED} samples, because torch draws larger ones in another way",
        )
    order = np.arange(size, dtype=np.int64)
    Mersenne(seed & 0xFFFFFFFF).swap_onwards(order)
    return order
