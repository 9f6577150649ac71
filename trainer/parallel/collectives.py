"""Every collective of the trainer, each over an explicit group of ranks.

No other file calls torch.distributed for data, so communication can be audited here. Over a group of one each function
returns its input, so that one rank and many run the same code. Functions return new tensors; those that write into
their argument end in `_`, and those that only start an operation and return a pending result begin with `start_`.
conjugates.py has the collectives that autograd differentiates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(slots=True)
class Channel:
    """Which of a group's two communicators is in use: passes that run at the same time must not share one."""

    number: int = 0

    @contextmanager
    def use(self, number: int) -> Iterator[None]:
        """Use the first communicators within the block if the number is even, the second ones if it is odd."""
        before, self.number = self.number, number % 2
        try:
            yield
        finally:
            self.number = before


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks along one axis of the mesh, from the view of one of them.

    Args:
        name: of the axis.
        size: ranks in it.
        rank: this rank's position in it.
        first: the process group; None when size is 1.
        second: another group of the same ranks, for channel 1; None if not needed.
        channel: which one is in use.
    """

    name: str
    size: int
    rank: int
    first: dist.ProcessGroup | None = None
    second: dist.ProcessGroup | None = None
    channel: Channel | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group in use; None when size is 1."""
        return self.first if self.channel is None or self.channel.number == 0 else self.second

    @staticmethod
    def single(name: str) -> Group:
        """A group of one: every collective over it is the identity."""
        return Group(name, 1, 0)


def all_reduce_(x: Tensor, group: Group, *, op: str = "sum") -> Tensor:
    """Sum (or "max") over the group, written into x and returned."""
    if group.size > 1:
        dist.all_reduce(x, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op], group=group.group)
    return x


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Concatenate every rank's x along dim 0: [n, ...] -> [n * size, ...]."""
    if group.size == 1 or not x.is_cuda:
        return start_all_gather(x, group).wait()
    out = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    _renamed("all_gather_single", "all_gather_into_tensor")(out, x.contiguous(), group=group.group)
    return out


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum over the group, then keep this rank's part of dim 0: [n * size, ...] -> [n, ...]."""
    if group.size == 1 or not x.is_cuda:
        return start_reduce_scatter(x, group).wait()
    assert x.shape[0] % group.size == 0, f"dim 0 is {x.shape[0]}, not a multiple of {group.name}={group.size}"
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    _renamed("reduce_scatter_single", "reduce_scatter_tensor")(out, x.contiguous(), group=group.group)
    return out


def all_to_all(x: Tensor, *, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """Send elements of a flat tensor to each rank, and receive some of each: [sum of send] -> [sum of receive].

    Args:
        send, receive: number of elements for and from each rank, in rank order; the numbers of both sides must match.
    """
    if group.size == 1:
        return x
    out = x.new_empty(sum(receive))
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group.group)
    return out


def start_all_to_all(x: Tensor, *, send: Sequence[int], receive: Sequence[int], group: Group) -> Pending:
    """Start `all_to_all`; x must not change until `wait`."""
    if group.size == 1:
        return Pending(x)
    out, sizes = x.new_empty(sum(receive)), (list(receive), list(send))
    return Pending(out, dist.all_to_all_single(out, x.contiguous(), *sizes, group=group.group, async_op=True))


def exchange(x: Tensor, *, peer: int, group: Group) -> Tensor:
    """Swap a tensor with one other rank of the group; the remaining ranks take no part."""
    out = torch.empty_like(x)
    send = dist.P2POp(dist.isend, x, group=group.group, group_peer=peer)
    receive = dist.P2POp(dist.irecv, out, group=group.group, group_peer=peer)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return out


@dataclass(slots=True)
class Pending:
    """A result that may still be in transit; communication overlaps with computation until `wait`.

    Args:
        finish: the work left once it has arrived.
    """

    result: Tensor
    work: Any = None
    finish: Callable[[], None] | None = None

    def wait(self) -> Tensor:
        """The result; computation from here on is ordered after it."""
        if self.work is not None:
            self.work.wait()
        if self.finish is not None:
            finish, self.finish = self.finish, None
            finish()
        return self.result

    def wait_at_most(self, seconds: float) -> Tensor:
        """`wait`, but on CPUs for at most this long.

        Raises:
            RuntimeError: the other side did not arrive, or has ended.
        """
        if self.work is not None:
            if self.result.is_cuda:
                self.work.wait()  # of the stream, not of the host
            else:
                self.work.wait(timedelta(seconds=seconds))
        return self.result

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.work is None or bool(self.work.is_completed())


def start_all_reduce_(x: Tensor, group: Group) -> Pending:
    """Start the sum over the group, written into x."""
    if group.size == 1:
        return Pending(x)
    return Pending(x, dist.all_reduce(x, group=group.group, async_op=True))


def start_all_gather(x: Tensor, group: Group) -> Pending:
    """Start `all_gather`."""
    if group.size == 1:
        return Pending(x)
    out = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    return start_all_gather_(out, group, own=x)


def start_reduce_scatter(x: Tensor, group: Group) -> Pending:
    """Start `reduce_scatter`."""
    if group.size == 1:
        return Pending(x)
    assert x.shape[0] % group.size == 0, f"dim 0 is {x.shape[0]}, not a multiple of {group.name}={group.size}"
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    return _start_reduce_scatter(out, x.contiguous(), group)


def start_all_gather_(buffer: Tensor, group: Group, *, own: Tensor) -> Pending:
    """Start writing every rank's part of dim 0, [n] of [n * size], into every rank's buffer.

    Args:
        own: this rank's part: of the buffer, or another tensor; it must not change until `wait`.
    """
    if group.size == 1:
        return Pending(buffer if own.data_ptr() == buffer.data_ptr() else buffer.copy_(own))
    if buffer.is_cuda:
        gather = _renamed("all_gather_single", "all_gather_into_tensor")
        return Pending(buffer, gather(buffer, own.contiguous(), group=group.group, async_op=True))
    out, work = _start_exchange(own.expand(group.size, *own.shape).flatten(0, 1), group)
    return Pending(buffer, work, lambda: _keep(buffer.copy_(out)))


def start_reduce_scatter_(buffer: Tensor, group: Group) -> Pending:
    """Start a sum over the group in place; returns this rank's part of dim 0, a view. The rest is then undefined."""
    own = buffer.unflatten(0, (group.size, -1))[group.rank]
    return Pending(own) if group.size == 1 else _start_reduce_scatter(own, buffer, group)


def start_sum_(buffer: Tensor, group: Group) -> Pending:
    """Start a sum over the group in place; on CPUs bitwise equal to reduce-scatter and all-gather."""
    if group.size == 1 or buffer.is_cuda:
        return start_all_reduce_(buffer, group)
    first = start_reduce_scatter_(buffer, group)
    return Pending(buffer, None, lambda: _keep(start_all_gather_(buffer, group, own=first.wait()).wait()))


def start_send(x: Tensor, link: Group) -> Pending:
    """Start sending to the other rank of a link; x must not change until `wait`.

    Messages of a link arrive in the order in which they were sent. Each direction has its own group: if both neighbours
    are the same rank, messages of equal shapes could otherwise be mixed up.
    """
    work = dist.isend(x, group=link.group, group_dst=1 - link.rank)
    return Pending(x, work)


def start_receive_(x: Tensor, link: Group) -> Pending:
    """Start receiving the next message of a link into x."""
    return Pending(x, dist.irecv(x, group=link.group, group_src=1 - link.rank))


def gather_objects(value: T, group: Group) -> list[T]:
    """Every rank's value, in rank order, on every rank; for small Python objects."""
    if group.size == 1:
        return [value]
    if (answer := getattr(group.group, "gather_objects", None)) is not None:  # recorded.py: there are no others
        return list(answer(value, group))
    out: list[Any] = [None] * group.size
    dist.all_gather_object(out, value, group=group.group)
    return out


def _start_reduce_scatter(out: Tensor, x: Tensor, group: Group) -> Pending:
    if x.is_cuda:
        scatter = _renamed("reduce_scatter_single", "reduce_scatter_tensor")
        return Pending(out, scatter(out, x, group=group.group, async_op=True))
    parts, work = _start_exchange(x, group)
    return Pending(out, work, lambda: _keep(out.copy_(parts.unflatten(0, (group.size, -1)).sum(0))))


def _start_exchange(x: Tensor, group: Group) -> tuple[Tensor, Any]:
    """Send part i of dim 0 to rank i; returns (received parts in rank order, pending work).

    On CPUs the functions above are built from it: gloo's own take up to three times as long for the messages of a small
    model, with a tail of 4 ms (benchmarks/collectives.py), and gloo's sum has no fixed order.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, dist.all_to_all_single(out, x.contiguous(), group=group.group, async_op=True)


def _keep(_: Tensor) -> None:
    """The result is already in the tensor that was passed."""


def _renamed(new: str, old: str) -> Callable[..., Any]:
    """PyTorch 2.13 renamed these two; 2.11 has only the old names."""
    return getattr(dist, new, None) or getattr(dist, old)
