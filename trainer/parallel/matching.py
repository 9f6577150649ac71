"""Checks that the communication of all ranks matches: their records are run against each other.

A collective is done when all members of its group have reached it, and all must be at the same one. Messages of a link
arrive in the order in which they were sent, and the receive that takes one must expect it; sends do not block the
sender. Every group and every link of every rank takes part, though ranks that do the same share one record. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Group = tuple[int, ...]


class Entry(NamedTuple):
    """One communication of a rank.

    Args:
        kind: join: a collective. send, receive: a message; started, not waited for. wait: for a started receive.
        axis: of the rank's group or link.
        signature: must be equal on all sides; for a message it is its name, so that it can be waited for.
        action: what the rank was doing, for messages.
        times: number of collectives that it represents.
    """

    kind: Literal["join", "send", "receive", "wait"]
    axis: Hashable
    signature: Hashable
    action: str = ""
    times: int = 1


@dataclass(frozen=True, slots=True)
class Matched:
    """The counts of a successful match.

    Args:
        collectives: joined by all of their groups. groups: of more than one rank that took part.
        messages: sent and received. links: on which there were any.
    """

    collectives: int
    groups: int
    messages: int
    links: int


class Mismatch(Exception):
    """The communication of ranks does not match; the message names two of them and their operations."""


@dataclass(frozen=True, slots=True, eq=False)
class _Members:
    ranks: Group


@dataclass(slots=True)
class _Position:
    """A group at its next collective, or a link."""

    arrived: list[int]
    entry: Entry | None = None
    collectives: int = 0


def match(programs: Sequence[Sequence[Entry]], groups: Sequence[dict[Hashable, Group]]) -> Matched:
    """Run all ranks to their ends.

    Args:
        programs: of each rank; ranks may share one. groups: of each rank, axis -> its members, or (sender, receiver).

    Raises:
        Mismatch: two ranks are at different collectives or messages, or some wait forever.
    """
    return _Matching(programs, groups).run()


class _Matching:
    def __init__(self, programs: Sequence[Sequence[Entry]], groups: Sequence[dict[Hashable, Group]]) -> None:
        # One object for each group, hashed by identity because a group may have thousands of members.
        unique_members: dict[Group, _Members] = {}
        members_by_id: dict[int, _Members] = {}
        self.programs = programs
        self.groups: list[dict[Hashable, _Members]] = []
        for of_rank in groups:
            for group in of_rank.values():
                if id(group) not in members_by_id:
                    members_by_id[id(group)] = unique_members.setdefault(group, _Members(group))
            self.groups.append({axis: members_by_id[id(group)] for axis, group in of_rank.items()})
        self.position = [0] * len(programs)
        self.places: dict[_Members, _Position] = defaultdict(lambda: _Position([]))
        self.sent: dict[_Members, deque[Hashable]] = defaultdict(deque)
        self.begun: dict[_Members, deque[Hashable]] = defaultdict(deque)
        # Counted: the tensors of one message may have the same shape, such as T5's two tables of biases.
        self.there: dict[_Members, Counter[Hashable]] = defaultdict(Counter)
        self.messages: dict[_Members, int] = defaultdict(int)
        self.waiting: dict[_Members, int] = {}
        self.ready = deque(range(len(programs)))

    def run(self) -> Matched:
        while self.ready:
            rank = self.ready.popleft()
            program, groups = self.programs[rank], self.groups[rank]
            while self.position[rank] < len(program):
                entry = program[self.position[rank]]
                if not self._do(rank, entry, groups[entry.axis]):
                    break
                self.position[rank] += 1
        if problem := next(self._left(), ""):
            raise Mismatch(problem)
        return Matched(
            collectives=sum(place.collectives for place in self.places.values()),
            groups=len(self.places),
            messages=sum(self.messages.values()),
            links=len(self.messages),
        )

    def _do(self, rank: int, entry: Entry, group: _Members) -> bool:
        """Whether the rank advances to its next entry."""
        if entry.kind == "join":
            return self._join(rank, entry, group)
        if entry.kind == "wait":
            if self.there[group][entry.signature]:
                self.there[group][entry.signature] -= 1
                return True
            self.waiting[group] = rank
            return False
        (self.sent if entry.kind == "send" else self.begun)[group].append(entry.signature)
        self._deliver(group)
        return True

    def _join(self, rank: int, entry: Entry, group: _Members) -> bool:
        place = self.places[group]
        if place.entry is None:
            place.entry = entry
        elif place.entry.signature != entry.signature:
            first = place.arrived[0]
            raise Mismatch(
                f"over {entry.axis} = ranks {_shown(group.ranks)} rank {first} does {_named(place.entry)}, "
                f"and rank {rank} {_named(entry)}"
            )
        place.arrived.append(rank)
        if len(place.arrived) < len(group.ranks):
            return False
        for other in place.arrived:
            if other != rank:
                self.position[other] += 1
                self.ready.append(other)
        place.collectives += entry.times
        place.arrived, place.entry = [], None
        return True

    def _deliver(self, link: _Members) -> None:
        while self.sent[link] and self.begun[link]:
            sent, taken = self.sent[link].popleft(), self.begun[link].popleft()
            if sent != taken:
                raise Mismatch(f"rank {link.ranks[0]} sends {sent} to rank {link.ranks[1]}, which expects {taken}")
            self.messages[link] += 1
            self.there[link][sent] += 1
            if link in self.waiting:
                self.ready.append(self.waiting.pop(link))

    def _left(self) -> Iterator[str]:
        """Problems: ranks that did not finish, those at the earliest entry first; then unreceived messages."""
        stuck = [rank for rank, program in enumerate(self.programs) if self.position[rank] < len(program)]
        for rank in sorted(stuck, key=lambda rank: self.position[rank]):
            entry = self.programs[rank][self.position[rank]]
            group = self.groups[rank][entry.axis]
            missing = [other for other in group.ranks if other not in self.places[group].arrived]
            others = f"rank {group.ranks[0]}" if entry.kind == "wait" else f"ranks {_shown(tuple(missing))}"
            yield f"rank {rank} waits for ever for {others} in {_named(entry)} over {entry.axis}"
        for link in self.sent:
            if self.sent[link] or self.begun[link]:
                operation = [*self.sent[link], *self.begun[link]][0]
                yield f"between rank {link.ranks[0]} and rank {link.ranks[1]} {operation} has only one side"


def _named(entry: Entry) -> str:
    return f"{entry.action}: {entry.signature}" if entry.action else str(entry.signature)


def _shown(ranks: Group) -> str:
    return ", ".join(map(str, ranks[:4])) + (f", ... ({len(ranks)})" if len(ranks) > 4 else "")
