"""Runs a lowered schedule on whole numbers: the slow twin of the executor, for tests of schedules.

Stage s computes (s + 2) x + w_s, and the loss of microbatch m is the last output times m + 1; messages carry only their
numbers, and are received in the order in which they were sent, as on a real link.
"""

from __future__ import annotations

from collections import defaultdict, deque

from trainer.pipeline.actions import Action, Link, Schedule


class Stuck(Exception):
    """No rank can go on, or one has to use what it does not have."""


def interpret(schedule: Schedule, *, waiting: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(the gradient of each stage's w, outputs of the last stage); sends do not block.

    Args:
        waiting: computations wait for all messages that their rank has begun, as the first launch of a kernel does.
    """
    machine = _Machine(schedule, waiting)
    position = [0] * len(schedule.actions)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while position[rank] < len(actions) and machine.do(actions[position[rank]]):
                position[rank] += 1
                moved = True
    if any(at < len(actions) for at, actions in zip(position, schedule.actions, strict=True)):
        raise Stuck(f"stands at {position}")
    if any(machine.on_the_way.values()) or any(machine.begun.values()):
        raise Stuck("messages are left")
    outputs = [machine.values["F", schedule.num_stages - 1, m] for m in range(schedule.num_microbatches)]
    return tuple(machine.weights), tuple(outputs)


class _Machine:
    def __init__(self, schedule: Schedule, waiting: bool) -> None:
        self.schedule, self.waiting, self.last = schedule, waiting, schedule.num_stages - 1
        self.on_the_way: dict[Link, deque[int]] = defaultdict(deque)
        self.begun: dict[Link, deque[tuple[str, int, int]]] = defaultdict(deque)
        self.values: dict[tuple[str, int, int], int] = {}  # outputs F, gradients of inputs G, what RECV brought
        self.weights = [0] * schedule.num_stages

    def do(self, action: Action) -> bool:
        kind, stage, m = action
        if kind.startswith("SEND"):
            value = self.values.get(("F" if kind == "SEND_F" else "G", stage, m))
            if value is None:
                raise Stuck(f"{action} has nothing to send")
            link = self.schedule.link(action)
            self.on_the_way[link].append(value)
            self._deliver(link)
            return True
        if kind.startswith("RECV"):
            link = self.schedule.link(action)
            self.begun[link].append(action)
            self._deliver(link)
            return True
        return self._compute(action)

    def _compute(self, action: Action) -> bool:
        kind, stage, m = action
        if self.waiting and self._has_begun_messages(self.schedule.stage_ranks[stage]):
            return False
        if kind == "F":
            x = m if stage == 0 else self._input(action, ("F", stage - 1, m))
            if x is not None:
                self.values["F", stage, m] = (stage + 2) * x + 7 * stage
            return x is not None
        if kind == "W":
            self.weights[stage] += self.values["D", stage, m]
            return True
        gradient = m + 1 if stage == self.last else self._input(action, ("G", stage + 1, m))
        if gradient is None or ("F", stage, m) not in self.values:
            return False
        self.values["G", stage, m], self.values["D", stage, m] = gradient * (stage + 2), gradient
        self.weights[stage] += gradient if kind == "B" else 0
        return True

    def _has_begun_messages(self, rank: int) -> bool:
        sends = any(sent for link, sent in self.on_the_way.items() if link[0] == rank)
        return sends or any(begun for link, begun in self.begun.items() if link[1] == rank)

    def _input(self, action: Action, local: tuple[str, int, int]) -> int | None:
        receive = self.schedule.input_message(action)
        return self.values.get(local if receive is None else tuple(receive))

    def _deliver(self, link: Link) -> None:
        while self.on_the_way[link] and self.begun[link]:
            self.values[tuple(self.begun[link].popleft())] = self.on_the_way[link].popleft()
