"""Actions and schedules as data: their text, inputs and outputs, and every rule of the validator broken once."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.pipeline.actions import Action, Kind, Schedule, looped, peak_live, stages_of, v_shaped
from trainer.pipeline.generators import make_schedule
from trainer.pipeline.lower import lower
from trainer.pipeline.validate import validate


def actions(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


def lists(*texts: str, stage_ranks: tuple[int, ...] = (0, 1), microbatches: int = 1) -> Schedule:
    parsed = tuple(map(actions, texts))
    return Schedule(name="test", stage_ranks=stage_ranks, num_microbatches=microbatches, actions=parsed)


@given(st.sampled_from(get_args(Kind)), st.integers(0, 99), st.integers(0, 999))
def test_an_action_is_read_back_from_its_text(kind, stage, microbatch):
    action = Action(kind, stage, microbatch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F3", "0F", "0X3", "0F3 ", "-1F3", "0f3", "0SEND3", "0SENDF3"])
def test_other_text_is_no_action(text):
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)


def test_placements_by_hand():
    assert looped(2, 2) == (0, 1, 0, 1) and v_shaped(2) == (0, 1, 1, 0)
    assert stages_of(v_shaped(3), 1) == (1, 4) and stages_of(looped(2, 3), 1) == (1, 3, 5)


def test_a_message_has_one_link_and_one_partner():
    """With two ranks and two stages each, both directions of activations share a link with gradients."""
    schedule = make_schedule("interleaved", num_ranks=2, num_microbatches=2)
    sends = {"0SEND_F0": (0, 1), "1SEND_F0": (1, 0), "2SEND_B0": (0, 1), "1SEND_B0": (1, 0)}
    assert {text: schedule.link(Action.parse(text)) for text in sends} == sends
    partners = {"0SEND_F0": "1RECV_F0", "2SEND_B1": "1RECV_B1"}
    assert {text: str(schedule.partner(Action.parse(text))) for text in partners} == partners
    for text in sends:
        receive = schedule.partner(Action.parse(text))
        assert schedule.partner(receive) == Action.parse(text) and schedule.link(receive) == sends[text]


def test_what_stays_on_a_rank_is_no_message():
    schedule = make_schedule("zb_v", num_ranks=2, num_microbatches=1)
    given = {text: schedule.output_message(Action.parse(text)) for text in ("0F0", "1F0", "2F0", "3F0", "2I0", "0I0")}
    assert {text: str(message) for text, message in given.items() if message} == {"0F0": "0SEND_F0", "2F0": "2SEND_F0"}


def test_two_stages_by_hand():
    lowered = lower(make_schedule("1f1b", num_ranks=2, num_microbatches=2))
    assert [" ".join(map(str, each)) for each in lowered.actions] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]
    assert [peak_live(each) for each in lowered.actions] == [2, 1]


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ("0F0 0SEND_F0 0RECV_B0", "1RECV_F0 1F0 1B0 1SEND_B0", "0B0 happens 0 times, not 1"),
        ("0F0 0SEND_F0 0RECV_B0 0B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0", "0B0 happens 2 times, not 1"),
        ("0F0 0SEND_F0 0RECV_B0 0I0", "1RECV_F0 1F0 1B0 1SEND_B0", "0W0 happens 0 times, not 1"),
        ("0F0 0SEND_F0 0RECV_B0 0B0 2F0", "1RECV_F0 1F0 1B0 1SEND_B0", "is outside 2 stages x 1 microbatches"),
        ("0F0 0SEND_F0 0RECV_B0 0B0 1F0", "1RECV_F0 1B0 1SEND_B0", "1F0 at position 4 of rank 0 belongs to rank 1"),
        ("0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0", "0SEND_F0 happens too few times"),
        ("0F0 0SEND_F0 0RECV_B0 0B0 0SEND_B0", "1RECV_F0 1F0 1B0 1SEND_B0", "0SEND_B0 has no other side"),
        ("0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0", "rank 0 waits forever in 0SEND_F0"),
        ("0F0 0SEND_F0 0B0 0RECV_B0", "1RECV_F0 1F0 1B0 1SEND_B0", "waits forever in 0B0 at position 2 for 0RECV_B0"),
        ("0RECV_B0 0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0", "waits forever in 0F0 at position 1 for 1SEND_B0"),
        ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1B0 1F0 1SEND_B0", "waits forever in 1B0 at position 1 for 1F0"),
    ],
)  # fmt: skip
def test_each_problem_is_named(first, second, problem):
    assert any(problem in found for found in validate(lists(first, second)))


def test_messages_that_cross_are_named():
    schedule = lower(make_schedule("1f1b", num_ranks=2, num_microbatches=2))
    crossed = list(schedule.actions[1])
    crossed[0], crossed[1] = crossed[1], crossed[0]
    problems = validate(replace(schedule, actions=(schedule.actions[0], tuple(crossed))))
    assert problems == ["link 0 -> 1: message 0 is sent by 0SEND_F0, and 1RECV_F1 receives it"]


def test_sends_that_block_each_other_are_found():
    """Each rank sends before it begins to receive: with blocking sends neither goes on."""
    schedule = lists(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        microbatches=2,
    )
    assert validate(schedule) == [
        "rank 0 waits forever in 0SEND_F1 at position 3 for 1RECV_F1",
        "rank 1 waits forever in 1SEND_B0 at position 3 for 0RECV_B0",
    ]


def test_nothing_keeps_nothing():
    assert peak_live(()) == 0
