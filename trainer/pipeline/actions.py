"""Pipeline schedules as data: what a rank does, in order.

An action is (kind, stage, microbatch) with a text form such as `0F3`: stage 0, forward, microbatch 3. A
schedule is a tuple of actions; `executor.py` runs any of them. `validate`, `peak_live` and `render` look at
a schedule without running it. Today there is one generator, for one stage; a pipeline will add generators,
not executors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, cast

Kind = Literal["F", "B"]


class Action(NamedTuple):
    """One thing that a rank does: the forward (F) or backward (B) pass of a microbatch through a stage."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that `str` wrote.

        Raises:
            ValueError: the text is not an action.
        """
        match = re.fullmatch(r"(\d+)([FB])(\d+)", text, re.ASCII)
        if match is None:
            raise ValueError(f"{text!r} is not an action; expected stage, F or B, microbatch, such as 0F3")
        return cls(cast(Kind, match[2]), int(match[1]), int(match[3]))


def one_stage(num_microbatches: int) -> tuple[Action, ...]:
    """The schedule without a pipeline: each microbatch forward, then backward; one is live at a time."""
    return tuple(Action(kind, 0, m) for m in range(num_microbatches) for kind in ("F", "B"))


def validate(actions: Sequence[Action], *, num_stages: int, num_microbatches: int) -> list[str]:
    """Everything that is wrong with a schedule of all stages in one order; empty if it can be run.

    Each microbatch goes once forward and once backward through each stage; forward after the forward of the
    stage before; backward after its own forward and after the backward of the stage behind.
    """
    wanted = {Action(kind, s, m) for kind in ("F", "B") for s in range(num_stages) for m in range(num_microbatches)}
    problems = [f"{action} never happens" for action in sorted(wanted - set(actions), key=_reading_order)]
    done: set[Action] = set()
    for position, action in enumerate(actions):
        where = f"{action} at position {position}"
        if action not in wanted:
            problems.append(f"{where} is outside {num_stages} stages x {num_microbatches} microbatches")
        if action in done:
            problems.append(f"{where} happens twice")
        problems += [f"{where} comes before {need}" for need in _needs(action, num_stages) if need not in done]
        done.add(action)
    return problems


def peak_live(actions: Sequence[Action]) -> int:
    """The most passes whose activations are kept at once (forward done, backward not)."""
    live = peak = 0
    for action in actions:
        live += 1 if action.kind == "F" else -1
        peak = max(peak, live)
    return peak


def render(actions: Sequence[Action]) -> str:
    """A text grid: one row a stage, one column an action, for people and for stored tests."""
    num_stages = max((action.stage for action in actions), default=-1) + 1
    width = max((len(f"{action.kind}{action.microbatch}") for action in actions), default=0)
    rows = []
    for stage in range(num_stages):
        cells = (f"{a.kind}{a.microbatch}" if a.stage == stage else "." for a in actions)
        rows.append(f"stage {stage} | " + " ".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join(rows)


def _needs(action: Action, num_stages: int) -> Iterator[Action]:
    kind, stage, microbatch = action
    if kind == "F" and stage > 0:
        yield Action("F", stage - 1, microbatch)
    if kind == "B":
        yield Action("F", stage, microbatch)
        if stage + 1 < num_stages:
            yield Action("B", stage + 1, microbatch)


def _reading_order(action: Action) -> tuple[int, int, bool]:
    return action.microbatch, action.stage, action.kind == "B"
