"""Computes the time of a schedule from the cost of each action: the step, its bubble, each rank's idle time.

Computations of a rank run one after another; messages run one after another on each directed link, in parallel with
computation. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainer.pipeline.actions import Action, Link, Schedule, needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds (or any unit of time) of the actions of each stage.

    Args:
        forward, inputs, weights: of F, I and W; B takes I and W. transfer: of a message.
    """

    forward: Sequence[float]
    inputs: Sequence[float]
    weights: Sequence[float]
    transfer: float = 0.0

    @classmethod
    def equal(cls, num_stages: int, *, transfer: float = 0.0) -> Costs:
        """Every stage takes 1 for each of F, I and W."""
        ones = (1.0,) * num_stages
        return cls(forward=ones, inputs=ones, weights=ones, transfer=transfer)

    def of(self, action: Action) -> float:
        """Time of a computation."""
        stage = action.stage
        if action.kind == "B":
            return self.inputs[stage] + self.weights[stage]
        return {"F": self.forward, "I": self.inputs, "W": self.weights}[action.kind][stage]


class ActionSpan(NamedTuple):
    """A computation, with its start and end."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The simulated step: the computations of each rank, in order."""

    spans: tuple[tuple[ActionSpan, ...], ...]

    @property
    def step(self) -> float:
        """Time from the first action to the last."""
        return max((span.stop for spans in self.spans for span in spans), default=0.0)

    @property
    def idle(self) -> tuple[float, ...]:
        """Time in the step during which each rank computes nothing."""
        return tuple(self.step - sum(span.stop - span.start for span in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """Idle time divided by busy time, of the busiest rank: (p - 1) / m for 1F1B."""
        busy = self.step - min(self.idle)
        return min(self.idle) / busy if busy else 0.0


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Simulate a schedule, lowered or not: each computation's message leaves at its end.

    Raises:
        ValueError: the computations cannot run in this order.
    """
    lists = [[action for action in actions if not action.is_message] for actions in schedule.actions]
    clock, spans = [0.0] * len(lists), [list[ActionSpan]() for _ in lists]
    free: dict[Link, float] = defaultdict(float)
    stops: dict[Action, float] = {}  # of computations; of sends: when the message has arrived
    while left := sum(map(len, lists)) - sum(map(len, spans)):
        for rank, actions in enumerate(lists):
            while len(spans[rank]) < len(actions):
                action = actions[len(spans[rank])]
                start = _earliest(schedule, action, stops)
                if start is None:
                    break
                start = max(start, clock[rank])
                clock[rank] = stops[action] = start + costs.of(action)
                spans[rank].append(ActionSpan(action, start, clock[rank]))
                if send := schedule.output_message(action):
                    link = schedule.link(send)
                    free[link] = stops[send] = max(clock[rank], free[link]) + costs.transfer
        if left == sum(map(len, lists)) - sum(map(len, spans)):
            stuck = next(
                actions[len(done)] for actions, done in zip(lists, spans, strict=True) if len(done) < len(actions)
            )
            raise ValueError(f"the schedule {schedule.name} cannot be run: {stuck} waits forever")
    return Timeline(tuple(map(tuple, spans)))


def _earliest(schedule: Schedule, action: Action, stops: dict[Action, float]) -> float | None:
    """The time at which all inputs of an action are available; None: some are not computed yet."""
    times = [0.0]
    if receive := schedule.input_message(action):
        arrived = stops.get(schedule.partner(receive))
        if arrived is None:
            return None
        times.append(arrived)
    for either in needs(action, schedule.num_stages):
        if schedule.stage_ranks[either[0].stage] == schedule.stage_ranks[action.stage]:
            known_stops = [stops[need] for need in either if need in stops]
            if not known_stops:
                return None
            times += known_stops
    return max(times)
