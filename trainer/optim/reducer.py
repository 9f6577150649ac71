"""Sums gradients over data-parallel ranks, bucket by bucket, overlapped with backward.

If a rank keeps whole gradients they are summed once, in the last backward pass of a stage, each bucket when the last of
its blocks is complete. If it keeps only its own runs (`optimizer.sharding`), they are summed for each microbatch: a
bucket's gradients have memory from the first of its blocks that backward reaches until they are reduced and added to
the rank's run; at most one bucket is in transit while the next is filled (Rajbhandari et al. 2020, "ZeRO", stage 2).
Sums that were not started by then are done in `finish`, so a step without a backward pass has a zero gradient. After
it, `sum_copies` sums partial gradients of copies of parameters along other axes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.optim.buffers import Buffers, give_memory, has_memory, take_memory
from trainer.optim.ownership import Ownership
from trainer.parallel.collectives import Group, Pending, all_reduce_, start_reduce_scatter_, start_sum_


class GradientReducer:
    """The sums of one step after another.

    Args:
        held: the runs whose sum is needed on this rank.
        overlap: whether sums overlap with backward, or are waited for at once.
        shrink: divisor of gradients before the sum, so that sums in half precision stay finite.
    """

    def __init__(
        self, buffers: Buffers, groups: Mapping[str, Group], *, held: Ownership, overlap: bool, shrink: int = 1
    ) -> None:
        self.buffers, self.groups, self.overlap, self.shrink = buffers, groups, overlap, shrink
        self._held = held
        self._buckets = buffers.layout.buckets
        self._of_block = buffers.layout.of_block
        self._missing = [set(bucket.blocks) for bucket in self._buckets]  # blocks, by bucket
        self._pending: dict[int, Pending] = {}
        self._reduced: set[int] = set()  # buckets whose own run already has part of this step's gradient

    @torch.no_grad()
    def before_gradients(self, block: int) -> None:
        """The block's gradients are added to next."""
        if not self.buffers.shards_gradients:
            return
        for number in self._of_block.get(block, ()):
            self._wait(number)
            if has_memory(self.buffers.bucket_gradients[number]):
                self._missing[number].add(block)
                continue
            give_memory(self.buffers.bucket_gradients[number])
            self._missing[number] = set(self._buckets[number].blocks)
            self.buffers.forget(number)
            self.buffers.clear_gaps(number)

    @torch.no_grad()
    def after_gradients(self, block: int, *, last: bool) -> None:
        """A microbatch has added to the block's gradients; it may be the stage's last one in this step."""
        if not (last or self.buffers.shards_gradients):
            return
        for number in self._of_block.get(block, ()):
            self._missing[number].discard(block)
            if not self._missing[number] and (self.overlap or self.buffers.shards_gradients):
                self._start(number)

    @torch.no_grad()
    def finish(self) -> None:
        """Complete the sums over data-parallel ranks."""
        for number in range(len(self._buckets)):
            if number not in self._pending and self._is_left(number):
                self._start(number)
        for number in tuple(self._pending):
            self._wait(number)
        for number, bucket in enumerate(self._buckets):
            if self.buffers.shards_gradients and number not in self._reduced:
                self._own(number).zero_()
            self._missing[number] = set(bucket.blocks)
        self._reduced.clear()

    @torch.no_grad()
    def sum_copies(self) -> None:
        """Sum partial gradients of copies: kept gradients become those of the loss's sum, at least in the held runs."""
        for axis in ("tp", "kv", "ends"):
            partial = [segment for _, segment in self._held.segments() if axis in segment.rules.partial]
            if partial and self.groups[axis].size > 1:
                _sum_together([self.buffers.gradients.view(s.start, s.stop) for s in partial], self.groups[axis])

    def _is_left(self, number: int) -> bool:
        """Whether a bucket holds gradients that were not summed."""
        if self.buffers.shards_gradients:
            return has_memory(self.buffers.bucket_gradients[number])
        return number not in self._reduced

    def _start(self, number: int) -> None:
        """Start to sum a bucket; with sharded gradients, waits for the previous one."""
        buffers, group = self.buffers, self.groups[self._buckets[number].shard]
        flat = buffers.bucket_gradients[number]
        assert number not in self._pending, "a bucket that is being summed"
        assert buffers.shards_gradients or number not in self._reduced, "a bucket that was summed in this step"
        if buffers.shards_gradients:
            for other in tuple(self._pending):
                self._wait(other)
        buffers.settle(number)
        if self.shrink > 1:
            flat /= self.shrink
        start = start_sum_ if buffers.sharding == "none" else start_reduce_scatter_
        self._pending[number] = start(flat, group)
        if not self.overlap:
            self._wait(number)

    def _wait(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is None:
            return
        own = pending.wait()
        if self.buffers.shards_gradients:
            if number in self._reduced:
                self._own(number).add_(own)
            else:
                self._own(number).copy_(own)
            take_memory(self.buffers.bucket_gradients[number])
        self._reduced.add(number)

    def _own(self, number: int) -> Tensor:
        bucket = self._buckets[number]
        return self.buffers.gradients.view(*bucket.run(self.groups[bucket.shard].rank))


def _sum_together(parts: list[Tensor], group: Group) -> None:
    """Sum several tensors over a group in one message."""
    if len(parts) == 1:
        all_reduce_(parts[0], group)
        return
    joined = all_reduce_(torch.cat(parts), group)
    for part, total in zip(parts, joined.split([len(part) for part in parts]), strict=True):
        part.copy_(total)
