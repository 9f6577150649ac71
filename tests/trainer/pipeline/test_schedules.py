"""Generators, lowering and timing for all sizes; mutated schedules; bubbles against their formulas."""

from __future__ import annotations

import functools
import itertools
import random
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples, soaked
from tests.trainer.pipeline.interpreter import Stuck, interpret
from trainer.pipeline.actions import Action, Schedule, peak_live, stages_of
from trainer.pipeline.generators import SCHEDULES, default_chunks, forward_only, impossible, make_schedule, placement
from trainer.pipeline.lower import lower
from trainer.pipeline.render import render_svg, render_text
from trainer.pipeline.simulate import Costs, simulate
from trainer.pipeline.validate import validate

SIZES = {"num_ranks": st.integers(1, 9), "num_microbatches": st.integers(0, 24), "chunks": st.integers(0, 4)}


@examples(300)
@given(st.sampled_from(SCHEDULES), st.fixed_dictionaries(SIZES))
def test_every_possible_schedule_is_sound_and_every_other_is_refused(name, sizes):
    stages_each = sizes["chunks"] or default_chunks(name)
    if problem := impossible(name, **{**sizes, "chunks": stages_each}):
        with pytest.raises(ValueError, match=problem.split(",")[0]):
            make_schedule(name, **sizes)
        return
    lowered = lower(make_schedule(name, **sizes))
    assert validate(lowered) == []
    numbers = interpret(lowered)
    assert interpret(lowered, waiting=True) == numbers, "although a kernel's first launch waits for receives"
    alone = make_schedule("1f1b", num_ranks=1, num_microbatches=sizes["num_microbatches"])
    many = replace(alone, stage_ranks=(0,) * lowered.num_stages, actions=(_one_rank(lowered),))
    assert numbers == interpret(many), "the numbers of all stages on one rank"


def _one_rank(schedule: Schedule) -> tuple[Action, ...]:
    stages, count = range(schedule.num_stages), range(schedule.num_microbatches)
    return tuple(
        action
        for m in count
        for action in (*(Action("F", s, m) for s in stages), *(Action("B", s, m) for s in reversed(stages)))
    )


@given(st.integers(1, 8), st.integers(1, 12), st.sampled_from(SCHEDULES))
def test_forward_only_runs_on_every_placement(ranks, microbatches, name):
    if impossible(name, num_ranks=ranks, chunks=default_chunks(name), num_microbatches=ranks):
        return
    stage_ranks = placement(name, ranks, chunks=default_chunks(name))
    lowered = lower(forward_only(stage_ranks, microbatches))
    assert validate(lowered) == []
    assert {peak_live(each) for each in lowered.actions} == {microbatches * len(stages_of(stage_ranks, 0))}


@pytest.mark.parametrize("seed", soaked(range(10), but=[0, 1]))
def test_a_mutated_schedule_is_refused_or_gives_the_same_numbers(seed):
    """Schedules with two actions exchanged, one dropped, or one repeated elsewhere."""
    chance = random.Random(seed)
    refused = 0
    for _ in range(1000):
        name = chance.choice(SCHEDULES)
        ranks = chance.choice((2, 3))
        schedule = _lowered(name, ranks, ranks * chance.choice((1, 2)))
        mutated = _mutated(schedule, chance)
        if validate(mutated):
            refused += 1
            continue
        assert interpret(mutated) == interpret(schedule)
    assert 600 < refused < 1000, "some mutations do no harm"


@functools.cache
def _lowered(name: str, ranks: int, microbatches: int) -> Schedule:
    return lower(make_schedule(name, num_ranks=ranks, num_microbatches=microbatches))


def _mutated(schedule: Schedule, chance: random.Random) -> Schedule:
    lists = [list(actions) for actions in schedule.actions]
    chosen = chance.choice(lists)
    at, other = chance.randrange(len(chosen)), chance.randrange(len(chosen))
    match chance.choice(("swap", "swap", "drop", "duplicate")):
        case "swap":
            chosen[at], chosen[other] = chosen[other], chosen[at]
        case "drop":
            del chosen[at]
        case _:
            chosen.insert(other, chosen[at])
    return replace(schedule, actions=tuple(map(tuple, lists)))


def test_what_is_refused_as_stuck_does_not_run():
    """The interpreter is no rubber stamp: a schedule that waits for itself gives no numbers."""
    schedule = _lowered("1f1b", 2, 2)
    first = [action for action in schedule.actions[0] if str(action) != "0SEND_F0"]
    broken = replace(schedule, actions=(tuple(first), schedule.actions[1]))
    with pytest.raises(Stuck):
        interpret(broken)


@examples(20)
@given(st.integers(2, 8), st.integers(1, 6), st.integers(2, 4))
def test_bubbles_are_those_of_the_papers(p, rounds, v):
    m = p * rounds + p  # enough to come to a steady state
    bubble = {name: simulate(_lowered(name, p, m), Costs.equal(_stages(name, p))).bubble for name in SCHEDULES}
    assert bubble["1f1b"] == pytest.approx((p - 1) / m)
    assert bubble["gpipe"] == pytest.approx((p - 1) / m)
    interleaved = lower(make_schedule("interleaved", num_ranks=p, num_microbatches=m, chunks=v))
    assert simulate(interleaved, Costs.equal(p * v)).bubble == pytest.approx((p - 1) / (v * m))
    assert bubble["zb_h1"] == pytest.approx((p - 1) / (3 * m)), "(p - 1)(F + I - W) / (m (F + I + W))"
    assert bubble["zb_v"] == pytest.approx((p - 1) / (6 * m)), "half of it, because a stage is half as long"


def _stages(name: str, ranks: int) -> int:
    return ranks * default_chunks(name)


@given(st.integers(2, 6), st.integers(1, 3))
def test_memory_is_that_of_the_papers(p, rounds):
    m = p * (rounds + 1)
    peaks = {name: [peak_live(each) for each in _lowered(name, p, m).actions] for name in SCHEDULES}
    assert peaks["gpipe"] == [m] * p
    assert peaks["1f1b"] == [p - rank for rank in range(p)]
    assert peaks["zb_h1"] == [p] * p
    assert max(peaks["zb_v"]) == 2 * p, "as many as 1F1B, of stages half as long"
    assert peaks["interleaved"] == [2 * (p - rank - 1) + p + 1 for rank in range(p)]


@given(st.sampled_from(SCHEDULES), st.integers(2, 4), st.lists(st.floats(0.1, 3), min_size=8, max_size=8))
def test_a_timeline_has_each_computation_once_and_in_order(name, p, costs):
    schedule = _lowered(name, p, 2 * p)
    given = Costs(forward=costs, inputs=costs[::-1], weights=costs, transfer=0.5)
    timeline = simulate(schedule, given)
    starts = {action: start for spans in timeline.spans for action, start, _ in spans}
    for spans, actions in zip(timeline.spans, schedule.actions, strict=True):
        assert [span.action for span in spans] == [action for action in actions if not action.is_message]
        assert all(a.stop <= b.start for a, b in itertools.pairwise(spans))
        for action, start, _ in spans:
            if receive := schedule.input_message(action):
                stage = schedule.partner(receive).stage
                sources = [a for a in starts if a.stage == stage and a.microbatch == action.microbatch]
                source = next(a for a in sources if (a.kind == "F") == (action.kind == "F") and a.kind != "W")
                assert start >= starts[source] + given.of(source) + 0.5
    assert min(timeline.idle) >= -1e-9 and timeline.step >= max(s.stop for spans in timeline.spans for s in spans)


def test_the_grid_by_hand():
    timeline = simulate(_lowered("1f1b", 2, 2), Costs.equal(2))
    assert render_text(timeline, num_stages=2) == (
        "rank 0 | F0 F1 .  .  B0 -  .  B1 -\n"
        "rank 1 | .  F0 B0 -  F1 B1 -  .  ."
    )  # fmt: skip
    assert timeline.idle == (3.0, 3.0) and timeline.bubble == 0.5


def test_the_picture_has_every_computation():
    schedule = _lowered("zb_v", 2, 4)
    picture = ElementTree.fromstring(render_svg(simulate(schedule, Costs.equal(4))))
    titles = [element.text or "" for element in picture.iter() if element.tag.endswith("title")]
    computations = {str(a) for actions in schedule.actions for a in actions if not a.is_message}
    assert {title.split(":")[0] for title in titles} == computations and len(titles) == len(computations)
