"""Adds sends and receives to a schedule of computations.

A send comes right after the computation that made its tensors. Receives of one link are in the order of its sends,
whatever needs them first, because messages of a link do not overtake each other. A receive only starts: the computation
that needs the tensors waits for them. To overlap communication with computation, and so that a send never waits long
for its receive, each receive starts some messages before it is needed: one, or as few more as the schedule needs if
sends block. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from trainer.pipeline.actions import Action, Link, Schedule
from trainer.pipeline.validate import validate

MOST_AHEAD = 8  # messages of one link that are in transit before one is needed


def lower(schedule: Schedule) -> Schedule:
    """The schedule with its communication; it passes `validate`.

    Raises:
        ValueError: the computations cannot run in this order.
    """
    problems: list[str] = []
    for ahead in range(1, MOST_AHEAD + 1):
        lowered = _with_messages(schedule, ahead)
        problems = validate(lowered)
        if not problems:
            return lowered
    raise ValueError(f"the schedule {schedule.name} cannot be run: {'; '.join(problems[:3])}")


def _with_messages(schedule: Schedule, ahead: int) -> Schedule:
    sent: dict[Link, list[Action]] = defaultdict(list)
    for actions in schedule.actions:
        for action in actions:
            if send := schedule.output_message(action):
                sent[schedule.link(send)].append(send)
    lists = []
    for rank, actions in enumerate(schedule.actions):
        receives = _receives(schedule, rank, sent, ahead)
        out: list[Action] = []
        for position, action in enumerate(actions):
            out += receives.get(position, ())
            out.append(action)
            if send := schedule.output_message(action):
                out.append(send)
        lists.append(tuple(out))
    return replace(schedule, actions=tuple(lists))


def _receives(schedule: Schedule, rank: int, sent: dict[Link, list[Action]], ahead: int) -> dict[int, list[Action]]:
    """Position -> the receives that start before the computation there."""
    used = {need: at for at, action in enumerate(schedule.actions[rank]) if (need := schedule.input_message(action))}
    begun: dict[int, list[Action]] = defaultdict(list)
    for link, sends in sorted(sent.items()):
        if link[1] != rank:
            continue
        receives = [schedule.partner(send) for send in sends]
        latest = len(schedule.actions[rank])
        needed = []  # no later than any message behind it
        for receive in reversed(receives):
            latest = min(latest, used.get(receive, latest))
            needed.append(latest)
        needed.reverse()
        for number, receive in enumerate(receives):
            begun[needed[number - ahead] if number >= ahead else 0].append(receive)
    return begun
