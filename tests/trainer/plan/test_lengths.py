"""Lengths in steps, samples and tokens, resolved to one counter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.plan.test_plan import config
from trainer.plan.lengths import batch_sizes, run_length, schedule_lengths, training_samples

NONE = {"steps": 0}
RAMP = "2 2 24"  # 2 samples a step, then 4 and 6, to 8 from sample 24 on


def test_a_run_in_each_unit() -> None:
    assert run_length(config()).samples == 800
    assert run_length(config(train=NONE | {"samples": 807})).steps == 100
    assert run_length(config(train=NONE | {"tokens": 32 * 808 - 1})).steps == 100
    assert [training_samples(config(train=NONE | {unit: 3200})) for unit in ("samples", "tokens")] == [3200, 100]


@given(st.sampled_from(("", RAMP)), st.integers(1, 300), st.integers(0, 40))
def test_a_run_ends_at_its_length_wherever_it_goes_on(ramp: str, amount: int, done: int) -> None:
    by_samples, by_steps = ({"steps": 0, "samples": amount, "batch_ramp": ramp}, {"steps": amount, "batch_ramp": ramp})
    for train in (by_samples, by_steps):
        run = config(train=train, mesh={"tp": 1})
        whole, sizes = run_length(run), batch_sizes(run)
        assert whole.samples == sizes.after(whole.steps)
        steps = min(done, whole.steps)
        assert run_length(run, steps=steps, samples=sizes.after(steps)) == whole
    assert run_length(config(train=by_samples)).samples <= amount


@pytest.mark.parametrize(
    ("optimizer", "train", "expected"),
    [
        ({}, {}, ("steps", 10, 100, 0, 0)),
        ({"warmup_steps": 0, "warmup_fraction": 0.015}, {}, ("steps", 1.5, 100, 0, 0)),
        ({"decay_steps": 50, "wsd_decay_steps": 7}, {"steps": 90}, ("steps", 10, 50, 7, 0)),
        ({}, NONE | {"samples": 800}, ("samples", 80, 800, 0, 0)),
        ({}, NONE | {"tokens": 32 * 800 + 16}, ("samples", 80, 800.5, 0, 0)),
        ({"warmup_steps": 0, "warmup_tokens": 320}, {}, ("samples", 10, 800, 0, 0)),
        ({"warmup_steps": 0, "warmup_samples": 24, "wsd_decay_steps": 7}, {}, ("samples", 24, 800, 56, 0)),
        ({"decay_samples": 400}, {"batch_ramp": RAMP}, ("samples", 44, 400, 0, 0)),
        ({"weight_decay_schedule": "linear"}, {}, ("steps", 10, 100, 0, 100)),
        ({"weight_decay_schedule": "linear", "weight_decay_steps": 60}, {}, ("steps", 10, 100, 0, 60)),
    ],
)
def test_schedules_count_by_one_counter(optimizer: dict, train: dict, expected: tuple) -> None:
    found = schedule_lengths(config(optimizer=optimizer, train=train))
    assert (found.counter, found.warmup, found.decay, found.wsd_decay, found.weight_decay) == expected


def test_a_length_in_steps_stands_for_the_samples_that_they_read() -> None:
    run = config(train={"batch_ramp": RAMP}, optimizer={"decay_samples": 400})
    assert schedule_lengths(run).warmup == batch_sizes(run).after(10)
    assert schedule_lengths(run).span(steps=3, samples=6, batch=2) == (6, 8)
    assert schedule_lengths(config()).span(steps=3, samples=6, batch=2) == (3, 4)
