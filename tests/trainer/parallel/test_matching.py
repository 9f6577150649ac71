"""Records of ranks against each other: matching ones run to the end, each mismatch is named with its ranks."""

from __future__ import annotations

import random
from collections.abc import Hashable

import pytest

from trainer.parallel.matching import Entry, Group, Matched, Mismatch, match
from trainer.parallel.mesh import Mesh


def _groups(mesh: Mesh) -> list[dict[Hashable, Group]]:
    return [{axis: mesh.ranks_of(axis, rank) for axis in ("tp", "cp", "dp")} for rank in range(mesh.world_size)]


def _join(axis: str, what: str) -> Entry:
    return Entry("join", axis, what)


def test_ranks_of_a_random_program_come_to_their_ends():
    """Every rank runs one list over all axes; 4,096 ranks of it, or eight."""
    chance = random.Random(3)
    for mesh in (Mesh(8, 2, cp=2), Mesh(4096, 8, cp=2, pp=16)):
        entries = [_join(chance.choice(("tp", "cp", "dp")), str(i)) for i in range(12)]
        programs = [[e for e in entries if mesh.size(str(e.axis)) > 1]] * mesh.world_size
        groups = _groups(mesh)
        found = match(programs, groups)
        instances = {members for rank in groups for members in (rank[str(e.axis)] for e in programs[0])}
        assert found == Matched(
            collectives=sum(mesh.world_size // mesh.size(str(e.axis)) for e in programs[0]),
            groups=len(instances),
            messages=0,
            links=0,
        )


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ([_join("tp", "b"), _join("tp", "a")], "over tp = ranks 0, 1 rank 0 does a, and rank 1 b"),
        ([_join("tp", "a")], "rank 0 waits for ever for ranks 1 in b over tp"),
        ([_join("tp", "a"), _join("tp", "b"), _join("tp", "c")], "rank 1 waits for ever for ranks 0 in c over tp"),
    ],
)
def test_lists_that_differ_are_named(second, problem):
    with pytest.raises(Mismatch, match=problem):
        match([[_join("tp", "a"), _join("tp", "b")], second], _groups(Mesh(2, 2)))


def test_collectives_of_two_groups_that_wait_for_each_other():
    """Each of the four joins what the next has not come to: no two differ in any group, and none goes on."""
    mesh = Mesh(4, 2)
    tp, dp = _join("tp", "t"), _join("dp", "d")
    with pytest.raises(Mismatch, match="rank 0 waits for ever for ranks 1 in t over tp"):
        match([[tp, dp], [dp, tp], [dp, tp], [tp, dp]], _groups(mesh))


LINK = (0, 1)
PAIR: list[dict[Hashable, Group]] = [{LINK: (0, 1)}, {LINK: (0, 1)}]


def _messages(kind: str, *names: str) -> list[Entry]:
    return [Entry(kind, LINK, name) for name in names]  # type: ignore[arg-type]


def test_two_messages_of_one_name_are_two():
    """The tensors of one action may have equal shapes."""
    twice = ("table", "table")
    programs = [_messages("send", *twice), _messages("receive", *twice) + _messages("wait", *twice)]
    assert match(programs, PAIR).messages == 2


def test_messages_are_taken_in_the_order_of_sending():
    sends, receives = _messages("send", "a", "b"), _messages("receive", "a", "b")
    waits = _messages("wait", "b", "a")
    assert match([sends, receives + waits], PAIR).messages == 2
    with pytest.raises(Mismatch, match="rank 0 sends a to rank 1, which expects b"):
        match([sends, _messages("receive", "b", "a")], PAIR)
    with pytest.raises(Mismatch, match="rank 1 waits for ever for rank 0 in c"):
        match([sends, receives + _messages("wait", "c")], PAIR)
    with pytest.raises(Mismatch, match="between rank 0 and rank 1 b has only one side"):
        match([sends, _messages("receive", "a")], PAIR)
