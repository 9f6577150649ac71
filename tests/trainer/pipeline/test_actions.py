"""Schedules as data: stored grids, and each rule of the validator broken once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.pipeline.actions import Action, one_stage, peak_live, render, validate


def actions(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


@given(st.sampled_from("FB"), st.integers(0, 99), st.integers(0, 999))
def test_an_action_is_read_back_from_its_text(kind: str, stage: int, microbatch: int) -> None:
    action = Action(kind, stage, microbatch)  # type: ignore[arg-type]
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F3", "0F", "0X3", "0F3 ", "-1F3", "0f3"])
def test_other_text_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action"):
        Action.parse(text)


def test_the_schedule_of_one_stage_by_hand() -> None:
    assert one_stage(3) == actions("0F0 0B0 0F1 0B1 0F2 0B2")
    assert render(one_stage(3)) == "stage 0 | F0 B0 F1 B1 F2 B2"


@given(st.integers(1, 50))
def test_the_schedule_of_one_stage_is_sound_and_keeps_one_microbatch(num_microbatches: int) -> None:
    schedule = one_stage(num_microbatches)
    assert validate(schedule, num_stages=1, num_microbatches=num_microbatches) == []
    assert peak_live(schedule) == 1


def test_two_stages_by_hand() -> None:
    schedule = actions("0F0 1F0 0F1 1B0 0B0 1F1 1B1 0B1")
    assert validate(schedule, num_stages=2, num_microbatches=2) == []
    assert peak_live(schedule) == 3
    assert render(schedule) == (
        "stage 0 | F0 .  F1 .  B0 .  .  B1\n"
        "stage 1 | .  F0 .  B0 .  F1 B1 ."
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0F0 0B0 0F1", "0B1 never happens"),
        ("0F0 0B0 0B1 0F1", "0B1 at position 2 comes before 0F1"),
        ("0F0 0F0 0B0 0F1 0B1", "0F0 at position 1 happens twice"),
        ("0F0 0B0 0F1 0B1 0F2", "0F2 at position 4 is outside 1 stages x 2 microbatches"),
    ],
)
def test_each_problem_is_named(text: str, problem: str) -> None:
    assert problem in validate(actions(text), num_stages=1, num_microbatches=2)


def test_stages_wait_for_each_other() -> None:
    assert validate(actions("1F0 0F0 1B0 0B0"), num_stages=2, num_microbatches=1) == [
        "1F0 at position 0 comes before 0F0"
    ]
    assert validate(actions("0F0 1F0 0B0 1B0"), num_stages=2, num_microbatches=1) == [
        "0B0 at position 2 comes before 1B0"
    ]


def test_nothing_is_rendered_as_nothing() -> None:
    assert render(()) == "" and peak_live(()) == 0
