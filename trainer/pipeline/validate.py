"""Proves that a lowered schedule can be run, or lists everything that is wrong with it.

Each computation happens once, on the rank of its stage; a backward is whole or split; each message is sent once and
received once, in one order on each directed link; and all ranks reach the end, even if sends block until their receive
has started, and computations until all messages begun before them have arrived (lower.py says when they do). Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from trainer.pipeline.actions import Action, Kind, Link, Schedule, needs


def validate(schedule: Schedule) -> list[str]:
    """Every problem of a lowered schedule; empty: it runs to the end, with each action once.

    Whether it ends is only checked if there are no other problems.
    """
    problems = [*_wrong_counts(schedule), *_wrong_links(schedule)]
    return problems or list(_stuck(schedule))


def _wrong_counts(schedule: Schedule) -> Iterator[str]:
    """Computations that are missing, repeated, or on the wrong rank."""
    done: Counter[Action] = Counter()
    for rank, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            where = f"{action} at position {position} of rank {rank}"
            if not (0 <= action.stage < schedule.num_stages and 0 <= action.microbatch < schedule.num_microbatches):
                yield f"{where} is outside {schedule.num_stages} stages x {schedule.num_microbatches} microbatches"
            elif schedule.stage_ranks[action.stage] != rank:
                yield f"{where} belongs to rank {schedule.stage_ranks[action.stage]}"
            done[action] += 1
    backward = schedule.name != "forward"
    for stage in range(schedule.num_stages):
        for m in range(schedule.num_microbatches):
            split = done[Action("I", stage, m)] or done[Action("W", stage, m)]
            expected = ["F", *(("I", "W") if split else ("B",))] if backward else ["F"]
            for kind in ("F", "B", "I", "W"):
                count = done[Action(kind, stage, m)]
                if count != (kind in expected):
                    yield f"{stage}{kind}{m} happens {count} times, not {int(kind in expected)}"


def _wrong_links(schedule: Schedule) -> Iterator[str]:
    """Messages without a receive or a send, and links whose two sides have different orders."""
    sent: dict[Link, list[Action]] = defaultdict(list)
    received: dict[Link, list[Action]] = defaultdict(list)
    wanted: Counter[Action] = Counter()
    for actions in schedule.actions:
        for action in actions:
            if not 0 <= action.stage < schedule.num_stages:
                continue  # already reported
            if not action.is_message:
                both = (schedule.input_message(action), schedule.output_message(action))
                wanted.update(message for message in both if message)
                continue
            if not 0 <= schedule.partner(action).stage < schedule.num_stages:
                yield f"{action} has no other side"
                continue
            wanted[action] -= 1
            if action.kind.startswith("SEND"):
                sent[schedule.link(action)].append(action)
            else:
                received[schedule.link(action)].append(schedule.partner(action))
    for action, count in wanted.items():
        if count:
            yield f"{action} happens {'too few' if count > 0 else 'too many'} times"
    for link in sorted(sent.keys() | received.keys()):
        for number, (sent_action, taken) in enumerate(zip(sent[link], received[link], strict=False)):
            if sent_action != taken:
                taker = schedule.partner(taken)
                yield f"link {link[0]} -> {link[1]}: message {number} is sent by {sent_action}, and {taker} receives it"
                break


def _stuck(schedule: Schedule) -> Iterator[str]:
    """The position of each rank when none can continue; empty if all reach the end."""
    position = [0] * len(schedule.actions)
    coming: list[list[Action]] = [[] for _ in schedule.actions]  # sends whose receive has begun
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                if _waits_for(schedule, action, done, coming[rank]):
                    break
                if action.kind.startswith("RECV"):
                    coming[rank].append(schedule.partner(action))
                elif not action.is_message:
                    coming[rank].clear()
                done.add(action)
                position[rank] += 1
                moved = True
    for rank, actions in enumerate(schedule.actions):
        if position[rank] < len(actions):
            action = actions[position[rank]]
            missing = _waits_for(schedule, action, done, coming[rank])
            yield f"rank {rank} waits forever in {action} at position {position[rank]} for {missing}"


def _waits_for(schedule: Schedule, action: Action, done: set[Action], coming: list[Action]) -> Action | None:
    """An unfinished action that another one waits for; None: it can run.

    Args:
        coming: the sends of the messages that its rank has begun to receive.
    """
    if action.kind.startswith("RECV"):
        return None
    if action.kind.startswith("SEND"):
        made: tuple[Kind, ...] = ("F",) if action.kind == "SEND_F" else ("B", "I")
        if not any(Action(kind, action.stage, action.microbatch) in done for kind in made):
            return Action(made[0], action.stage, action.microbatch)
        receive = schedule.partner(action)
        return None if receive in done else receive
    brought = schedule.input_message(action)
    if brought and brought not in done:
        return brought
    if missing := next((send for send in coming if send not in done), None):
        return missing
    for either in needs(action, schedule.num_stages):
        local = schedule.stage_ranks[either[0].stage] == schedule.stage_ranks[action.stage]
        if local and not any(need in done for need in either):
            return either[0]
    return None
