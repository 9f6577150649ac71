"""Adds sends and receives to a schedule of computations.

All computations of all ranks are put into one order: that of their ends if each stage took the same time. A send comes
right after the computation that makes its tensors, and its receive on the other rank comes before the first computation
that is later than that in the order. So no message is begun that depends on a later computation of the rank that begins
it, and the schedule ends even if each computation waits for all messages begun before it. On GPUs some do: the first
launch of a kernel, and freeing memory, wait for every kernel that runs, and so for a receive. A receive only starts,
and the transfer overlaps with the computation that is under way when the tensors are made. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from trainer.pipeline.actions import Action, Schedule
from trainer.pipeline.simulate import Costs, simulate
from trainer.pipeline.validate import validate


def lower(schedule: Schedule) -> Schedule:
    """The schedule with its communication; it passes `validate`.

    Raises:
        ValueError: the computations cannot run in this order.
    """
    timeline = simulate(schedule, Costs.equal(schedule.num_stages))
    ends = [(span.stop, rank, span.action) for rank, spans in enumerate(timeline.spans) for span in spans]
    lists: list[list[Action]] = [[] for _ in schedule.actions]
    for _, rank, action in sorted(ends):
        lists[rank].append(action)
        if send := schedule.output_message(action):
            sender, receiver = schedule.link(send)
            lists[sender].append(send)
            lists[receiver].append(schedule.partner(send))
    lowered = replace(schedule, actions=tuple(map(tuple, lists)))
    if problems := validate(lowered):
        raise ValueError(f"the schedule {schedule.name} cannot be run: {'; '.join(problems[:3])}")
    return lowered
