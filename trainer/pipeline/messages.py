"""Tensors in transit between pipeline stages, in one step on one rank.

Sends do not block computation, and receives start where the schedule says, before their tensors are needed. On CPUs
each message is preceded by its action, so that a mix-up is an error instead of a wrong number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from trainer.errors import LostRankError
from trainer.models.stage import Tensors
from trainer.parallel.collectives import Group, Pending, start_receive_, start_send
from trainer.pipeline.actions import Action, Link, Schedule

_KINDS = ("SEND_F", "SEND_B")


class Messages:
    """The tensors that the stages of one rank send and receive.

    Args:
        schedule: lowered. rank: on the pipeline. links: as in World.
        wait_s: on CPUs, the longest wait for a message.
    """

    def __init__(self, schedule: Schedule, rank: int, *, links: Mapping[Link, Group], wait_s: float) -> None:
        self.schedule, self.rank, self.links, self.wait_s = schedule, rank, links, wait_s
        self._ready: dict[Action, Tensors] = {}  # by the receive that brings them, or would
        self._coming: dict[Action, list[Pending]] = {}
        self._leaving: deque[tuple[Action, Pending]] = deque()

    def give(self, send: Action, tensors: Tensors) -> None:
        """Store tensors for another stage: passed directly within this rank, otherwise kept until they are sent."""
        receive = self.schedule.partner(send)
        local = self.schedule.stage_ranks[receive.stage] == self.rank
        self._ready[receive if local else send] = tensors

    def take(self, receive: Action) -> Tensors:
        """The tensors from another stage for this one."""
        if receive not in self._coming:
            return self._ready.pop(receive)
        head, *parts = self._coming.pop(receive)
        said = self._wait(receive, head)
        assert said.device.type != "cpu" or said.tolist() == _header(self.schedule.partner(receive)), (
            f"rank {self.rank} waited for {receive}, and was sent the message {said.tolist()}"
        )
        return tuple(self._wait(receive, part) for part in parts)

    def send(self, send: Action) -> None:
        """Start sending the tensors stored for it."""
        link = self.links[self.schedule.link(send)]
        while self._leaving and self._leaving[0][1].is_done:  # its memory is free again
            self._wait(*self._leaving.popleft())
        tensors = self._ready.pop(send)
        with _named(self, send):
            if tensors[0].device.type == "cpu":
                self._leaving.append((send, start_send(torch.tensor(_header(send)), link)))
            self._leaving += [(send, start_send(tensor.contiguous(), link)) for tensor in tensors]

    def begin_receive(self, receive: Action, buffers: Tensors) -> None:
        """Start receiving into buffers."""
        link = self.links[self.schedule.link(receive)]
        with _named(self, receive):
            said, first = torch.zeros(3, dtype=torch.int64), buffers[0]
            head = start_receive_(said, link) if first.device.type == "cpu" else Pending(first)
            self._coming[receive] = [head, *(start_receive_(buffer, link) for buffer in buffers)]

    def finish(self) -> None:
        """Wait until all sends have finished."""
        while self._leaving:
            self._wait(*self._leaving.popleft())
        left = [*self._coming, *self._ready]
        assert not left, f"the schedule left {left[:4]} without what follows"

    def _wait(self, action: Action, pending: Pending) -> Tensor:
        with _named(self, action):
            return pending.wait_at_most(self.wait_s)


@contextmanager
def _named(messages: Messages, action: Action) -> Iterator[None]:
    """Name the message and the peer in an error of a connection."""
    try:
        yield
    except RuntimeError as error:
        rank, link = messages.rank, messages.schedule.link(action)
        peer = link[0] if link[1] == rank else link[1]
        raise LostRankError(
            f"pipeline rank {rank} cannot finish {action}, a message {'from' if link[0] == peer else 'to'} "
            f"pipeline rank {peer}",
            found=str(error).splitlines()[0][:200].encode("ascii", "ignore").decode().strip(),
            fix="check the output of the other ranks: one of them has ended or hangs",
        ) from error


def _header(send: Action) -> list[int]:
    return [_KINDS.index(send.kind), send.stage, send.microbatch]
