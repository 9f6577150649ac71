"""A rank's world without other ranks: process groups that record the operations that are called on them.

With tensors on the device "meta", which have shapes but no data, a step runs through the same code as on a cluster, in
a moment and without its memory. The operations on each group are recorded in order; matching.py then compares the
records of all ranks. A receive is recorded where it starts and where it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from trainer.parallel.collectives import Group
from trainer.parallel.mesh import AXES, Mesh
from trainer.parallel.world import World

Axis = str | tuple[int, int]  # of the mesh, or a directed link between two pipeline ranks


class Event(NamedTuple):
    """One operation of a rank on a group.

    Args:
        action: what the rank was doing. axis: the group.
        operation: of the process group; "wait": for a message that was started before.
        tensors: dtypes and shapes.
    """

    action: str
    axis: Axis
    operation: str
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


class Record:
    """The record of a rank's operations.

    Attributes:
        events: in order. action: what the rank is doing now; set by the caller.
        answers: the results for a rank that gathers Python objects over an axis.
    """

    def __init__(self, answers: Callable[[str, Any], list[Any]] | None = None) -> None:
        self.events: list[Event] = []
        self.action = ""
        self.answers = answers

    def add(self, axis: Axis, operation: str, *, tensors: tuple[Tensor, ...]) -> Event:
        """Record an operation."""
        shapes = tuple((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors)
        self.events.append(Event(self.action, axis, operation, shapes))
        return self.events[-1]


class RecordedGroup:
    """Replaces a `dist.ProcessGroup`: every operation is recorded, and finishes at once.

    Operations are not listed here: every method that collectives.py calls is one.
    """

    def __init__(self, record: Record, axis: Axis) -> None:
        self.record, self.axis = record, axis

    def __getattr__(self, operation: str) -> Callable[..., RecordedWork]:
        if operation.startswith("__"):
            raise AttributeError(operation)

        def call(*arguments: Any) -> RecordedWork:
            tensors = tuple(tensor for argument in arguments for tensor in _tensors(argument))
            return RecordedWork(self.record, self.record.add(self.axis, operation, tensors=tensors))

        return call

    def gather_objects(self, value: Any, group: Group) -> list[Any]:
        """The values of all ranks."""
        assert self.record.answers is not None, f"objects are gathered over {group.name}, and nobody answers"
        return self.record.answers(group.name, value)


class RecordedWork:
    """Replaces a finished `dist.Work`."""

    def __init__(self, record: Record, event: Event) -> None:
        self.record, self.event = record, event

    def wait(self, *_: Any) -> bool:
        """Record that a message is waited for."""
        if self.event.operation == "recv":
            self.record.events.append(self.event._replace(action=self.record.action, operation="wait"))
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True


def recorded_world(mesh: Mesh, rank: int, *, record: Record) -> World:
    """The world that `join_world` would return for a rank, on the device "meta"."""
    groups = {}
    for axis in AXES:
        if ranks := mesh.ranks_of(axis, rank):
            groups[axis] = _group(axis, len(ranks), rank=ranks.index(rank), record=record, where=axis)
    own = mesh.index("pp", rank)
    ways = [way for pairs in mesh.link_rounds() for pair in pairs if own in pair for way in (pair, pair[::-1])]
    return World(
        rank=rank,
        world_size=mesh.world_size,
        local_rank=0,
        local_world_size=1,
        mesh=mesh,
        coordinates=mesh.coordinates(rank),
        device=torch.device("meta"),
        groups=groups,
        links={way: _group("pp", 2, rank=sorted(way).index(own), record=record, where=way) for way in ways},
    )


def _group(name: str, size: int, *, rank: int, record: Record, where: Axis) -> Group:
    if size == 1:
        return Group.single(name)
    return Group(name, size, rank, cast(Any, RecordedGroup(record, where)))


def _tensors(argument: Any) -> list[Tensor]:
    if isinstance(argument, Tensor):
        return [argument]
    if isinstance(argument, list | tuple):
        return [tensor for each in argument for tensor in _tensors(each)]
    return []
