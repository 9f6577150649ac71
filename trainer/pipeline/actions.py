"""Pipeline schedules as data: what each rank does in a step, in order.

An action is (kind, stage, microbatch) with a text form such as `0F3`: stage 0, forward, microbatch 3. A schedule is one
list of actions per pipeline rank beside the rank of each stage, so that any placement of stages fits: stages in turn,
several of them per rank, or a V in which the first rank also has the last stage. generators.py makes schedules of
computation, lower.py adds sends and receives, validate.py proves that a schedule can be run, simulate.py times it,
render.py draws it and executor.py runs it. Pure, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
Link = tuple[int, int]  # (pipeline rank that sends, pipeline rank that receives)

_TEXT = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)", re.ASCII)


class Action(NamedTuple):
    """One action of a rank, for a microbatch and one of its stages.

    F: forward. B: backward, which is I (the gradient of the stage's input) and then W (those of its weights). SEND_F:
    the stage's output to the next stage. RECV_F: its input, from the previous stage. SEND_B: the gradient of its input
    to the previous stage. RECV_B: the gradient of its output, from the next stage.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text form of an action.

        Raises:
            ValueError: the text is not an action.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not an action; expected stage, kind, microbatch, such as 0F3 or 1SEND_B0")
        return cls(cast(Kind, match[2]), int(match[1]), int(match[3]))

    @property
    def is_message(self) -> bool:
        """Whether it communicates (otherwise it computes)."""
        return len(self.kind) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What all pipeline ranks do in one step.

    Args:
        name: of its generator.
        stage_ranks: the pipeline rank of each stage.
        num_microbatches: of the step.
        actions: of each pipeline rank, in order.
    """

    name: str
    stage_ranks: tuple[int, ...]
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return len(self.stage_ranks)

    def link(self, action: Action) -> Link:
        """The directed link of a message."""
        own, step = self.stage_ranks[action.stage], 1 if action.kind in ("SEND_F", "RECV_B") else -1
        other = self.stage_ranks[action.stage + step]
        return (own, other) if action.kind.startswith("SEND") else (other, own)

    def partner(self, action: Action) -> Action:
        """The receive that matches a send, or the send that matches a receive."""
        way, direction = action.kind.split("_")
        step = 1 if action.kind in ("SEND_F", "RECV_B") else -1
        kind = f"{'RECV' if way == 'SEND' else 'SEND'}_{direction}"
        return Action(cast(Kind, kind), action.stage + step, action.microbatch)

    def input_message(self, action: Action) -> Action | None:
        """The receive of a computation's input; None: no input, or from another stage of the same rank."""
        previous, following = action.stage - 1, action.stage + 1
        return self._message(
            action, {"F": ("RECV_F", previous), "B": ("RECV_B", following), "I": ("RECV_B", following)}
        )

    def output_message(self, action: Action) -> Action | None:
        """The send of a computation's output; None: no output, or to another stage of the same rank."""
        previous, following = action.stage - 1, action.stage + 1
        return self._message(action, {"F": ("SEND_F", following), "B": ("SEND_B", previous), "I": ("SEND_B", previous)})

    def _message(self, action: Action, messages: Mapping[Kind, tuple[Kind, int]]) -> Action | None:
        """The message that goes with a computation, from the kind of message and the other stage for its kind."""
        if action.kind not in messages:
            return None
        kind, other = messages[action.kind]
        if not 0 <= other < self.num_stages or self.stage_ranks[other] == self.stage_ranks[action.stage]:
            return None
        return Action(kind, action.stage, action.microbatch)


def looped(num_ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """The rank of each stage where stages go round the ranks `chunks` times (Narayanan et al. 2021, section 2.2)."""
    return tuple(stage % num_ranks for stage in range(num_ranks * chunks))


def v_shaped(num_ranks: int) -> tuple[int, ...]:
    """The rank of each stage where they go through the ranks and back (Qi et al. 2024): the first has the last too."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def stages_of(stage_ranks: Sequence[int], rank: int) -> tuple[int, ...]:
    """The stages of a rank, in their order."""
    return tuple(stage for stage, at in enumerate(stage_ranks) if at == rank)


def needs(action: Action, num_stages: int) -> Iterator[tuple[Action, ...]]:
    """The computations that must come before one; for each, the alternative actions."""
    kind, stage, microbatch = action
    if kind == "F" and stage > 0:
        yield (Action("F", stage - 1, microbatch),)
    if kind in ("B", "I"):
        yield (Action("F", stage, microbatch),)
        if stage + 1 < num_stages:
            yield Action("B", stage + 1, microbatch), Action("I", stage + 1, microbatch)
    if kind == "W":
        yield (Action("I", stage, microbatch),)


def peak_live(actions: Sequence[Action], sizes: Mapping[int, int] | None = None) -> int:
    """The peak that a rank keeps for backward, from each forward to its backward, including W.

    Args:
        sizes: how much a pass through each stage keeps; None: 1, so that passes are counted.
    """
    live = peak = 0
    for action in actions:
        live += ((action.kind == "F") - (action.kind in ("B", "W"))) * (sizes[action.stage] if sizes else 1)
        peak = max(peak, live)
    return peak
