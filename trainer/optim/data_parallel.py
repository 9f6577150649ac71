"""Data parallelism in a step: whole parameters are gathered for a block, gradients are summed bucket by bucket.

Parameters. If a rank keeps whole parameters, each bucket is gathered once after an update, in the order of use,
overlapped with the next forward pass; a block waits for its own. If it keeps only its own runs, a bucket has memory
while one of its blocks is computed, forward or backward, and that of the next block is gathered meanwhile (Rajbhandari
et al. 2020, "ZeRO", stage 3; Zhao et al. 2023, "PyTorch FSDP"). The last one used stays until another is needed.

Gradients. If a rank keeps whole gradients they are summed once, in the last backward pass of a stage, each bucket when
the last of its blocks is complete. If it keeps only its own runs (`optimizer.sharding`), they are summed for each
microbatch: a bucket's gradients have memory from the first of its blocks that backward reaches until they are reduced
and added to the rank's run; at most one bucket is in transit while the next is filled (ZeRO, stage 2). Sums that were
not started by then are done in `finish`, so a step without a backward pass has a zero gradient. After it, `sum_copies`
sums partial gradients of copies of parameters along other axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from trainer.layers.block_hooks import BlockHooks
from trainer.optim.buffers import Buffers, give_memory, has_memory, take_memory
from trainer.optim.ownership import Ownership
from trainer.parallel.collectives import (
    Group,
    Pending,
    all_reduce_,
    start_all_gather_,
    start_reduce_scatter_,
    start_sum_,
)


class ParameterGathers:
    """Gathers of parameters.

    Args:
        overlap: whether they overlap with computation, or are waited for at once.
    """

    def __init__(self, buffers: Buffers, groups: Mapping[str, Group], *, overlap: bool) -> None:
        self.buffers, self.groups, self.overlap = buffers, groups, overlap
        self._buckets = buffers.layout.buckets
        self._of_block = buffers.layout.of_block
        self._pending: dict[int, Pending] = {}
        self._in_memory: set[int] = set()  # sharded buckets that were gathered, or are on their way
        self._backward: int | None = None  # the block whose backward pass is running

    @torch.no_grad()
    def before_forward(self, block: int) -> None:
        """The block's parameters are used next; in a backward pass, for recomputation."""
        if block == 0:  # never recomputed; code that runs backward itself does not say where it ends
            self._backward = None
        if self._backward is None:
            self._use({block}, {block + 1})
        else:
            self._use({block, self._backward}, {min(block + 1, self._backward), self._backward - 1})

    @torch.no_grad()
    def before_backward(self, block: int) -> None:
        """The block's parameters are used by its backward pass next."""
        self._backward = block
        self._use({block}, {block - 1})

    def after_backward(self) -> None:
        """The backward pass of a block is over."""
        self._backward = None

    @torch.no_grad()
    def updated(self, number: int) -> None:
        """This rank's run of a bucket has changed, and so have those of the other ranks."""
        if self.buffers.shards_parameters or self.buffers.sharding == "none" or self._buckets[number].frozen:
            return
        self._start(number)

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for all gathers in progress."""
        for number in tuple(self._pending):
            self._wait(number)

    @torch.no_grad()
    def release(self) -> None:
        """Wait for all gathers in progress, and free the memory of sharded parameters."""
        self.wait()
        self._release_but(())

    @torch.no_grad()
    def whole(self) -> None:
        """Give all parameters memory and the values of the last update, until a block is computed."""
        self._use(self._of_block.keys(), ())

    def _use(self, blocks: Iterable[int], next_blocks: Iterable[int]) -> None:
        needed = self._numbers(blocks)
        if self.buffers.shards_parameters:
            coming = self._numbers(next_blocks) if self.overlap else []
            self._release_but({*needed, *coming})
            for number in [*needed, *coming]:
                if number not in self._in_memory:
                    self._start(number)
        for number in needed:
            self._wait(number)

    def _numbers(self, blocks: Iterable[int]) -> list[int]:
        """The buckets of blocks, in one order on all ranks."""
        return sorted({number for block in blocks for number in self._of_block.get(block, ())})

    def _release_but(self, wanted: Iterable[int]) -> None:
        for number in sorted(self._in_memory.difference(wanted)):
            self._wait(number)
            take_memory(self.buffers.bucket_parameters[number])
            self._in_memory.discard(number)

    def _start(self, number: int) -> None:
        bucket, flat = self._buckets[number], self.buffers.bucket_parameters[number]
        group = self.groups[bucket.shard]
        if self.buffers.shards_parameters:
            give_memory(flat)
            self._in_memory.add(number)
        own = self.buffers.parameters.view(*bucket.run(group.rank))
        self._pending[number] = start_all_gather_(flat, group, own=own)
        if not self.overlap:
            self._wait(number)

    def _wait(self, number: int) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None:
            pending.wait()


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
        self._buckets = [bucket for bucket in buffers.layout.buckets if not bucket.frozen]  # the first ones
        self._of_block = {
            block: [number for number in numbers if number < len(self._buckets)]
            for block, numbers in buffers.layout.of_block.items()
        }
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
        for axis in ("tp", "kv", "etp", "ends"):
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


class DataParallelHooks(BlockHooks):
    """Blocks wait for their parameters, and report when their gradients are complete."""

    def __init__(self, gathers: ParameterGathers, reducer: GradientReducer) -> None:
        super().__init__()
        self.gathers, self.reducer = gathers, reducer

    def before_forward(self, block: int, *, adds: bool = False) -> None:
        """Wait for the parameters; a pass that adds to main gradients needs memory for them."""
        self.gathers.before_forward(block)
        if adds:
            self.reducer.before_gradients(block)

    def before_backward(self, block: int) -> None:
        """Wait for the parameters, whose memory sharded ranks had freed."""
        self.gathers.before_backward(block)
        super().before_backward(block)

    def after_backward(self, block: int) -> None:
        """The parameters are no longer needed."""
        self.gathers.after_backward()
        super().after_backward(block)

    def before_gradients(self, block: int) -> None:
        """Memory for sharded gradients."""
        self.reducer.before_gradients(block)

    def after_gradients(self, block: int) -> None:
        """Start summing complete gradients."""
        self.reducer.after_gradients(block, last=self.last_microbatch)
