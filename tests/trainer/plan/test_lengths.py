"""Lengths in steps, samples and tokens, resolved to one counter; MDATA_SOAK multiplies the random runs."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import SOAK
from tests.trainer.plan.test_plan import FACTS, config
from trainer.config.sections import RunConfig
from trainer.optim.schedules import rates
from trainer.plan.check import check
from trainer.plan.lengths import batch_sizes, run_length, schedule_lengths, training_samples

NONE = {"steps": None}
RAMP = "2 2 24"  # 2 samples a step, then 4 and 6, to 8 from sample 24 on
TABLE = "0:2 256:4 1K:8"  # tokens: 2 samples a step, 4 from sample 8 on, 8 from sample 31 on


def test_a_run_in_each_unit():
    assert run_length(config().train).samples == 800
    assert run_length(config(train=NONE | {"samples": 807}).train).steps == 100
    assert run_length(config(train=NONE | {"tokens": 32 * 808 - 1}).train).steps == 100
    assert [training_samples(config(train=NONE | {unit: 3200}).train) for unit in ("samples", "tokens")] == [3200, 100]


@given(st.sampled_from(({}, {"batch_ramp": RAMP}, {"batch_schedule": TABLE})), st.integers(1, 300), st.integers(0, 40))
def test_a_run_ends_at_its_length_wherever_it_goes_on(sizes, amount, done):
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
def test_schedules_count_by_one_counter(optimizer, train, expected):
    found = schedule_lengths(config(optimizer=optimizer, train=train))
    assert (found.counter, found.warmup, found.decay, found.wsd_decay, found.weight_decay) == expected


SIZES = st.sampled_from(({}, {"batch_ramp": RAMP}, {"batch_schedule": TABLE}, {"batch_schedule": "0:16 3200:8"}))


@given(SIZES, st.integers(1, 60), st.integers(0, 30), st.integers(1, 60), st.booleans())
def test_lengths_in_steps_among_lengths_in_samples(sizes, steps, warmup, last, wsd):
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


def test_the_decay_of_wsd_begins_with_one_of_the_last_steps_of_a_table():
    train = {"steps": 20, "batch_schedule": "0:2 1K:8"}
    optimizer = {"schedule": "wsd", "warmup_steps": None, "warmup_samples": 4, "wsd_decay_steps": 10}
    run = config(train=train, optimizer=optimizer)
    lengths = schedule_lengths(run)
    assert (lengths.decay, lengths.decay - lengths.wsd_decay) == (64, 20) and check(run, 2, facts=None) == []
    longer = config(train=train, optimizer=optimizer | {"wsd_decay_steps": 21})
    assert any("wsd_decay_steps=21 is longer than the schedule, of 64" in p for p in check(longer, 2, facts=None))


def test_a_blend_that_ends_is_compared_with_the_samples_that_the_steps_read():
    run, ends = config(train={"steps": 20, "batch_schedule": "0:2 1K:8"}), dataclasses.replace(FACTS, num_samples=64)
    assert check(run, 2, facts=ends) == []
    problems = check(run, 2, facts=dataclasses.replace(ends, num_samples=63))
    expected = "train.steps=20 x train.batch_schedule='0:2 1K:8' reads 64 samples, and mix.json ends after 63; "
    assert len(problems) == 1 and problems[0].startswith(f"{expected}choose at most 19 steps")


def test_a_length_in_steps_stands_for_the_samples_that_they_read():
    run = config(train={"batch_ramp": RAMP}, optimizer={"decay_samples": 400})
    assert schedule_lengths(run).warmup == batch_sizes(run.train).after(10)
    assert schedule_lengths(run).span(steps=3, samples=6, batch=2) == (6, 8)
    assert schedule_lengths(config()).span(steps=3, samples=6, batch=2) == (3, 4)


def test_a_table_of_batch_sizes_is_megatrons(oracles):
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


def test_a_table_of_batch_sizes_has_a_place_in_the_checks():
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


def test_a_schedule_of_its_own_length_may_be_longer_than_the_run():
    """As in short runs of Megatron-LM's: the run ends within its warmup."""
    run = config(optimizer={"warmup_steps": None, "warmup_fraction": 0.1, "decay_steps": 100_000})
    assert schedule_lengths(run).warmup == 10_000 and check(run, 2, facts=None) == []
    assert any(
        "is more than train.steps=100" in p for p in check(config(optimizer={"warmup_steps": 101}), 2, facts=None)
    )


UNITS = {"steps": 1, "samples": 8, "tokens": 8 * 32}  # of each in a step of the largest batch
REMAINING = {
    "linear": lambda u: 1 - u,
    "cosine": lambda u: (1 + math.cos(math.pi * u)) / 2,
    "exponential": lambda u: 2 * 0.5**u - 1,
    "minus_sqrt": lambda u: 1 - math.sqrt(u),
}


def _scheduled(chance: random.Random) -> RunConfig:
    """A run with drawn schedules, whose lengths are in any units; `check` may refuse it."""
    pick = chance.choice

    def length(prefix: str, most: int) -> dict[str, int]:
        unit = pick(["steps", *UNITS])
        return {f"{prefix}{unit}": chance.randint(1, most) * UNITS[unit]}

    steps, size = chance.randint(1, 40), pick((RAMP, "2 2 200", TABLE, "0:3 3K:8", "0:12 2K:2 6K:8", None))
    sizes = {} if size is None else {"batch_schedule" if ":" in size else "batch_ramp": size}
    optimizer: dict[str, Any] = {
        "schedule": pick(("cosine", "linear", "constant", "inverse_sqrt", "wsd", "wsd")),
        "min_lr": pick((0.0, 1e-4)),
        "init_lr": pick((0.0, 1e-5)),
        "embedding_lr": pick((None, 5e-3)),
        "warmup_count": pick(("after", "before")),
        "warmup_steps": None,
        "wsd_decay": pick(list(REMAINING)),
        "weight_decay_schedule": pick(("constant", "linear", "cosine")),
        "weight_decay_end": 0.3,
    }
    optimizer |= pick(({}, {"warmup_fraction": pick((0.1, 0.4))}, length("warmup_", 6)))
    optimizer |= pick(({}, length("decay_", steps + 5)))
    if optimizer["schedule"] == "wsd":
        optimizer |= length("wsd_decay_", 8)
    if optimizer["weight_decay_schedule"] != "constant":
        optimizer |= pick(({}, length("weight_decay_", steps)))
    train = {"micro_batch": 1} | NONE | length("", steps) | sizes
    return config(train=train, mesh={"tp": 1}, optimizer=optimizer)


def _twin(run: RunConfig) -> list[tuple[float, float, float]]:
    """Learning rates and weight decay of each step, as docs/howto/training.md has them: by a loop over the steps."""
    optimizer, sizes, starts = run.optimizer, batch_sizes(run.train), [0]
    while len(starts) < 500:
        starts.append(starts[-1] + sizes.at(starts[-1]))
    lengths = dict[str, tuple[str, float]]()
    for name in ("", "warmup_", "decay_", "wsd_decay_", "weight_decay_"):
        for unit in UNITS:
            if amount := getattr(optimizer if name else run.train, f"{name}{unit}"):
                lengths[name] = ("samples", amount / 32) if unit == "tokens" else (unit, amount)
    unit, amount = lengths.pop("")
    steps = int(amount) if unit == "steps" else max(n for n, start in enumerate(starts) if start <= amount)
    lengths.setdefault("decay_", (unit, amount))
    if optimizer.weight_decay_schedule != "constant":
        lengths.setdefault("weight_decay_", (unit, amount))
    in_steps = all(unit == "steps" for unit, _ in lengths.values())
    counter = list(range(len(starts))) if in_steps else starts

    def end(name: str) -> float:
        unit, amount = lengths.get(name, ("samples", 0))
        return counter[int(amount)] if unit == "steps" else amount

    end_of_decay = end("decay_")
    warmup = end("warmup_") or (optimizer.warmup_fraction or 0) * end_of_decay
    begin = end_of_decay - end("wsd_decay_")
    if lengths.get("wsd_decay_", ("",))[0] == "steps":
        last = max(n for n, count in enumerate(counter) if count <= end_of_decay)
        wsd = int(lengths["wsd_decay_"][1])
        begin = end_of_decay - (counter[last] - counter[last - wsd])

    def rate(step: int, high: float, low: float) -> float:
        x, y = counter[step : step + 2]
        if optimizer.warmup_count == "before" and 0 < warmup >= x:
            return optimizer.init_lr + (high - optimizer.init_lr) * x / warmup
        if optimizer.warmup_count == "after" and x < warmup:
            return optimizer.init_lr + (high - optimizer.init_lr) * min(1, y / warmup)
        if optimizer.schedule == "constant":
            return high
        if x > end_of_decay or (x == end_of_decay and optimizer.schedule != "inverse_sqrt"):
            return low
        if optimizer.schedule == "inverse_sqrt":
            return max(low, high * math.sqrt(max(warmup, 1) / max(x, 1)))
        if optimizer.schedule == "wsd":
            done = max(0, x - begin) / (end_of_decay - begin)
            return low + (high - low) * REMAINING[optimizer.wsd_decay](done)
        return low + (high - low) * REMAINING[optimizer.schedule]((x - warmup) / (end_of_decay - warmup))

    def decay(step: int) -> float:
        if optimizer.weight_decay_schedule == "constant":
            return optimizer.weight_decay
        done = min(1, counter[step] / end("weight_decay_"))
        share = REMAINING[optimizer.weight_decay_schedule](done)
        return optimizer.weight_decay_end + (optimizer.weight_decay - optimizer.weight_decay_end) * share

    peaks = (optimizer.lr, optimizer.min_lr)
    own = (optimizer.embedding_lr, optimizer.embedding_min_lr) if optimizer.embedding_lr else peaks
    return [(rate(step, *peaks), rate(step, *own), decay(step)) for step in range(steps)]


@pytest.mark.scaled
@pytest.mark.parametrize("seed", range(40 * SOAK))
def test_the_rates_of_a_random_run_are_those_of_the_page(seed):
    chance = random.Random(seed)
    run = next(drawn for drawn in iter(lambda: _scheduled(chance), None) if not check(drawn, 1, facts=None))
    print(run.train, run.optimizer)  # shown where it fails
    expected, sizes, lengths = _twin(run), batch_sizes(run.train), schedule_lengths(run)
    samples, found = 0, []
    for step in range(run_length(run.train).steps):
        assert run_length(run.train, steps=step, samples=samples) == run_length(run.train)
        at = rates(run.optimizer, lengths, steps=step, samples=samples, batch=sizes.at(samples))
        found.append((at.learning_rate, at.embedding_learning_rate, at.weight_decay))
        samples += sizes.at(samples)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-18)
