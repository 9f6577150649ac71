"""Lengths in steps, samples and tokens, resolved to one counter."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.plan.test_plan import FACTS, config
from trainer.plan.check import check
from trainer.plan.lengths import batch_sizes, run_length, schedule_lengths, training_samples

NONE = {"steps": None}
RAMP = "2 2 24"  # 2 samples a step, then 4 and 6, to 8 from sample 24 on
TABLE = "0:2 256:4 1K:8"  # tokens: 2 samples a step, 4 from sample 8 on, 8 from sample 31 on


def test_a_run_in_each_unit() -> None:
    assert run_length(config().train).samples == 800
    assert run_length(config(train=NONE | {"samples": 807}).train).steps == 100
    assert run_length(config(train=NONE | {"tokens": 32 * 808 - 1}).train).steps == 100
    assert [training_samples(config(train=NONE | {unit: 3200}).train) for unit in ("samples", "tokens")] == [3200, 100]


@given(st.sampled_from(({}, {"batch_ramp": RAMP}, {"batch_schedule": TABLE})), st.integers(1, 300), st.integers(0, 40))
def test_a_run_ends_at_its_length_wherever_it_goes_on(sizes: dict, amount: int, done: int) -> None:
    by_samples, by_steps = ({"steps": None, "samples": amount, **sizes}, {"steps": amount, **sizes})
    for train in (by_samples, by_steps):
        run = config(train=train, mesh={"tp": 1})
        whole, steps_of = run_length(run.train), batch_sizes(run.train)
        assert whole.samples == steps_of.after(whole.steps)
        steps = min(done, whole.steps)
        assert run_length(run.train, steps=steps, samples=steps_of.after(steps)) == whole
    assert run_length(config(train=by_samples).train).samples <= amount


@pytest.mark.parametrize(
    ("optimizer", "train", "expected"),
    [
        ({}, {}, ("steps", 10, 100, 0, 0)),
        ({"warmup_steps": None, "warmup_fraction": 0.015}, {}, ("steps", 1.5, 100, 0, 0)),
        ({"decay_steps": 50, "wsd_decay_steps": 7}, {"steps": 90}, ("steps", 10, 50, 7, 0)),
        ({}, NONE | {"samples": 800}, ("samples", 80, 800, 0, 0)),
        ({}, NONE | {"tokens": 32 * 800 + 16}, ("samples", 80, 800.5, 0, 0)),
        ({"warmup_steps": None, "warmup_tokens": 320}, {}, ("samples", 10, 800, 0, 0)),
        ({"warmup_steps": None, "warmup_samples": 24, "wsd_decay_steps": 7}, {}, ("samples", 24, 800, 56, 0)),
        ({"decay_samples": 400}, {"batch_ramp": RAMP}, ("samples", 44, 400, 0, 0)),
        ({"weight_decay_schedule": "linear"}, {}, ("steps", 10, 100, 0, 100)),
        ({"weight_decay_schedule": "linear", "weight_decay_steps": 60}, {}, ("steps", 10, 100, 0, 60)),
    ],
)
def test_schedules_count_by_one_counter(optimizer: dict, train: dict, expected: tuple) -> None:
    found = schedule_lengths(config(optimizer=optimizer, train=train))
    assert (found.counter, found.warmup, found.decay, found.wsd_decay, found.weight_decay) == expected


SIZES = st.sampled_from(({}, {"batch_ramp": RAMP}, {"batch_schedule": TABLE}, {"batch_schedule": "0:16 3200:8"}))


@given(SIZES, st.integers(1, 60), st.integers(0, 30), st.integers(1, 60), st.booleans())
def test_lengths_in_steps_among_lengths_in_samples(sizes: dict, steps: int, warmup: int, last: int, wsd: bool) -> None:
    """A slow loop over the steps says which samples they read."""
    own = {"schedule": "wsd", "wsd_decay_steps": last} if wsd else {"weight_decay_schedule": "linear"}
    lengths = {"warmup_steps": warmup, "weight_decay_steps": 0 if wsd else last}
    run = config(train={"steps": steps, **sizes}, optimizer={**own, **lengths}, mesh={"tp": 1})
    in_samples, consumed = schedule_lengths(run, in_samples=True), [0]
    for _ in range(max(steps, warmup, last)):
        consumed.append(consumed[-1] + batch_sizes(run.train).at(consumed[-1]))
    assert (in_samples.warmup, in_samples.decay) == (consumed[warmup], consumed[steps])
    if not wsd:
        assert in_samples.weight_decay == consumed[last]
    elif last <= steps:
        assert in_samples.decay - in_samples.wsd_decay == consumed[steps - last]
    else:
        assert in_samples.wsd_decay > in_samples.decay
    assert schedule_lengths(run).counter == "steps"


def test_the_decay_of_wsd_begins_with_one_of_the_last_steps_of_a_table() -> None:
    train = {"steps": 20, "batch_schedule": "0:2 1K:8"}
    optimizer = {"schedule": "wsd", "warmup_steps": None, "warmup_samples": 4, "wsd_decay_steps": 10}
    run = config(train=train, optimizer=optimizer)
    lengths = schedule_lengths(run)
    assert (lengths.decay, lengths.decay - lengths.wsd_decay) == (64, 20) and check(run, 2, facts=None) == []
    longer = config(train=train, optimizer=optimizer | {"wsd_decay_steps": 21})
    assert any("wsd_decay_steps=21 is longer than the schedule, of 64" in p for p in check(longer, 2, facts=None))


def test_a_blend_that_ends_is_compared_with_the_samples_that_the_steps_read() -> None:
    run, ends = config(train={"steps": 20, "batch_schedule": "0:2 1K:8"}), dataclasses.replace(FACTS, num_samples=64)
    assert check(run, 2, facts=ends) == []
    problems = check(run, 2, facts=dataclasses.replace(ends, num_samples=63))
    expected = "train.steps=20 x train.batch_schedule='0:2 1K:8' reads 64 samples, and mix.json ends after 63; "
    assert len(problems) == 1 and problems[0].startswith(f"{expected}choose at most 19 steps")


def test_a_length_in_steps_stands_for_the_samples_that_they_read() -> None:
    run = config(train={"batch_ramp": RAMP}, optimizer={"decay_samples": 400})
    assert schedule_lengths(run).warmup == batch_sizes(run.train).after(10)
    assert schedule_lengths(run).span(steps=3, samples=6, batch=2) == (6, 8)
    assert schedule_lengths(config()).span(steps=3, samples=6, batch=2) == (3, 4)


def test_a_table_of_batch_sizes_is_megatrons(oracles: Path) -> None:
    """Its tables, in tokens: the size of each step by the samples before it."""
    cases = json.loads((oracles / "oracle" / "sampler" / "cases.json").read_text())["schedules"]
    tables = [case for case in cases if "text" in case and "rows" in case and case["seq_length"]]
    for case in tables:
        train = {"batch_schedule": case["text"], "sequence_length": case["seq_length"], "micro_batch": 1}
        run = config(train=train | {"global_batch": case["parsed"][-1][1]})
        got = batch_sizes(run.train)
        assert [list(entry) for entry in got.table] == case["parsed"]
        assert [got.at(row[1]) for row in case["rows"]] == [row[2] for row in case["rows"] if row[2] != "refused"]
    assert len(tables) == 2


def test_a_table_of_batch_sizes_has_a_place_in_the_checks() -> None:
    run = config(train={"batch_schedule": TABLE})
    assert training_samples(run.train) == 800 and check(run, 2, facts=None) == []
    falling = config(train={"batch_schedule": "0:16 3200:8"})
    assert training_samples(falling.train) == 1600 > run_length(falling.train).samples
    for keys, text in (
        ({"batch_schedule": "0:2 256:4"}, "ends with 4 samples, but train.global_batch=8; make them equal"),
        ({"batch_schedule": TABLE, "batch_ramp": RAMP}, "are both set; keep one"),
        ({"batch_schedule": "0:3 256:8"}, "has a step of 3 samples, which is not a multiple of"),
        ({"batch_schedule": "5K:8"}, "train.batch_schedule='5K:8': the table of batch sizes cannot be used"),
    ):
        problems = check(config(train=keys), 2, facts=None)
        assert any(text in problem for problem in problems), problems


def test_a_schedule_of_its_own_length_may_be_longer_than_the_run() -> None:
    """As in short runs of Megatron-LM's: the run ends within its warmup."""
    run = config(optimizer={"warmup_steps": None, "warmup_fraction": 0.1, "decay_steps": 100_000})
    assert schedule_lengths(run).warmup == 10_000 and check(run, 2, facts=None) == []
    assert any(
        "is more than train.steps=100" in p for p in check(config(optimizer={"warmup_steps": 101}), 2, facts=None)
    )
