"""Gathers whole parameters, when a block needs them, from the ranks that own runs of them.

If a rank keeps whole parameters, each bucket is gathered once after an update, in the order of use, overlapped with the
next forward pass; a block waits for its own. If it keeps only its own runs, a bucket has memory while one of its blocks
is computed, forward or backward, and that of the next block is gathered meanwhile (Rajbhandari et al. 2020, "ZeRO",
stage 3; Zhao et al. 2023, "PyTorch FSDP"). The last one used stays until another is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from trainer.optim.buffers import Buffers, give_memory, take_memory
from trainer.parallel.collectives import Group, Pending, start_all_gather_


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
        if self.buffers.shards_parameters or self.buffers.sharding == "none":
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

    def _release_but(self, kept: Iterable[int]) -> None:
        for number in sorted(self._in_memory.difference(kept)):
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
