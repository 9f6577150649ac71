"""Learning rate and weight decay: by hand, against Megatron's tables, and invariants for any settings."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.sections import OptimizerSection
from trainer.optim.schedules import learning_rate, rates, weight_decay
from trainer.plan.lengths import ScheduleLengths

GOLDEN = Path(__file__).parents[2] / "golden" / "schedules.json"
NAMES = {"inverse-square-root": "inverse_sqrt", "WSD": "wsd"}


def lengths(*, warmup: float = 0, decay: float = 0, wsd: float = 0, weight: float = 0) -> ScheduleLengths:
    return ScheduleLengths(counter="steps", warmup=warmup, decay=decay, wsd_decay=wsd, weight_decay=weight)


def rate(step: int, optimizer: OptimizerSection, *, warmup: float = 0, decay: float = 0, wsd: float = 0) -> float:
    return learning_rate(optimizer, lengths(warmup=warmup, decay=decay, wsd=wsd), before=step, after=step + 1)


COSINE = OptimizerSection(lr=1.0, min_lr=0.2)

# The learning rate of embedding and head by Megatron-Core 0.16.1: OptimizerParamScheduler, --decoupled-lr 4e-4,
# --decoupled-min-lr 2e-5 beside --lr 1e-3, --min-lr 1e-4; warmup of 3 from 1e-5, decay until 10, WSD's over 4.
DECOUPLED = {
    "linear": "1e-05 0.00014 0.00027 0.0004 0.00034571428571428573 0.00029142857142857144 0.00023714285714285715 "
    "0.00018285714285714286 0.00012857142857142858 7.428571428571431e-05 2e-05 2e-05",
    "cosine": "1e-05 0.00014 0.00027 0.0004 0.00038118408490145963 0.0003284630623531594 0.00025227897745169975 "
    "0.0001677210225483003 9.153693764684064e-05 3.881591509854039e-05 2e-05 2e-05",
    "inverse_sqrt": "1e-05 0.00014 0.00027 0.0004 0.00034641016151377546 0.0003098386676965933 0.000282842712474619 "
    "0.0002618614682831908 0.0002449489742783178 0.0002309401076758503 0.00021908902300206643 2e-05",
    "wsd": "1e-05 0.00014 0.00027 0.0004 0.0004 0.0004 0.0004 0.000279081275592823 0.00017740115370177615 "
    "9.189870370103399e-05 2e-05 2e-05",
}


@pytest.mark.parametrize("schedule", DECOUPLED)
def test_the_rate_of_embedding_and_head_is_megatrons(schedule):
    own = {"embedding_lr": 4e-4, "embedding_min_lr": 2e-5, "wsd_decay": "exponential"}
    section = OptimizerSection(
        lr=1e-3,
        min_lr=1e-4,
        init_lr=1e-5,
        warmup_count="before",
        schedule=schedule,
        **own,  # type: ignore[arg-type]
    )
    ends = lengths(warmup=3, decay=10, wsd=4)
    found = [rates(section, ends, steps=step, samples=0, batch=1) for step in range(12)]
    expected = [float(number) for number in DECOUPLED[schedule].split()]
    assert [rate.embedding_learning_rate for rate in found] == pytest.approx(expected, rel=1e-14)
    alone = OptimizerSection(lr=1e-3, min_lr=1e-4, init_lr=1e-5, warmup_count="before", schedule=schedule)
    same = [rates(alone, ends, steps=step, samples=0, batch=1) for step in range(12)]
    assert all(rate.embedding_learning_rate == rate.learning_rate for rate in same)


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.25), (1, 0.5), (2, 0.75), (3, 1.0), (4, 1.0), (6, 0.2 + 0.4 * (1 + math.sqrt(0.5))), (8, 0.6),
     (10, 0.2 + 0.4 * (1 - math.sqrt(0.5))), (12, 0.2), (99, 0.2)],
)  # fmt: skip
def test_cosine_by_hand(step, expected):
    assert rate(step, COSINE, warmup=4, decay=12) == pytest.approx(expected, rel=1e-15)


def earlier_versions(step: int, lr: float, min_lr: float, *, warmup: int, decay: int) -> float:
    """What the trainer computed before it had other schedules."""
    if step < warmup:
        return lr * (step + 1) / warmup
    if step >= decay:
        return min_lr
    progress = (step - warmup) / (decay - warmup)
    return min_lr + (lr - min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


@given(st.integers(0, 50), st.integers(0, 200), st.floats(1e-9, 1e3), st.floats(0, 1), st.integers(0, 300))
def test_the_default_is_bit_equal_to_earlier_versions(warmup, decay, lr, low, step):
    section = OptimizerSection(lr=lr, min_lr=lr * low)
    expected = earlier_versions(step, lr, lr * low, warmup=warmup, decay=warmup + decay)
    assert rate(step, section, warmup=warmup, decay=warmup + decay) == expected


def test_a_run_that_is_all_warmup():
    section = OptimizerSection(lr=1.0)
    assert [rate(step, section, warmup=10, decay=10) for step in (0, 9, 10)] == [0.1, 1.0, 0.0]


def test_a_warmup_that_starts_above_zero_and_one_that_counts_before_the_step():
    after = OptimizerSection(lr=1.0, init_lr=0.5)
    assert [rate(step, after, warmup=4, decay=9) for step in range(4)] == [0.625, 0.75, 0.875, 1.0]
    before = OptimizerSection(lr=1.0, init_lr=0.5, warmup_count="before")
    assert [rate(step, before, warmup=4, decay=9) for step in range(5)] == [0.5, 0.625, 0.75, 0.875, 1.0]


def test_a_warmup_in_samples_counts_the_samples_of_the_step():
    section = OptimizerSection(lr=1.0, schedule="constant")
    by_samples = ScheduleLengths(counter="samples", warmup=10, decay=100, wsd_decay=0, weight_decay=0)
    steps = [(0, 0, 4), (1, 4, 4), (2, 8, 8), (3, 16, 8)]  # steps, samples, batch
    found = [rates(section, by_samples, steps=a, samples=b, batch=c).learning_rate for a, b, c in steps]
    assert found == [0.4, 0.8, 1.0, 1.0]


@given(
    st.sampled_from(("cosine", "linear", "constant", "inverse_sqrt", "wsd")),
    st.sampled_from(("linear", "cosine", "exponential", "minus_sqrt")),
    st.sampled_from(("after", "before")),
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
    st.tuples(st.just(0.0) | st.floats(1e-3, 50), st.floats(1, 200), st.floats(0.01, 1)),
)
def test_a_rate_rises_in_the_warmup_and_falls_behind_it(schedule, shape, count, low, sizes):
    """Between init_lr and lr, then between lr and min_lr, for every schedule."""
    (init, least), (warmup, decay, share) = low, sizes
    section = OptimizerSection(
        lr=1.0, min_lr=least, init_lr=init, schedule=schedule, wsd_decay=shape, warmup_count=count
    )
    where = {"warmup": warmup, "decay": warmup + decay, "wsd": share * decay}
    found = [rate(step, section, **where) for step in range(260)]
    risen = [r for step, r in enumerate(found) if step < warmup]
    fallen = [r for step, r in enumerate(found) if step > warmup]
    assert risen == sorted(risen) and all(init - 1e-12 <= r <= 1 + 1e-12 for r in risen)
    assert all(a >= b - 1e-12 for a, b in pairwise(fallen))
    assert all(least - 1e-12 <= r <= 1 + 1e-12 for r in fallen)
    assert schedule == "constant" or found[-1] == least


def theirs(table: dict[str, Any]) -> tuple[OptimizerSection, ScheduleLengths]:
    """Megatron's settings as ours."""
    told = table["settings"]
    section = OptimizerSection(
        lr=told["max_lr"],
        min_lr=told["min_lr"],
        init_lr=told["init_lr"],
        warmup_count="before",
        schedule=NAMES.get(told["lr_decay_style"], told["lr_decay_style"]),
        wsd_decay=told.get("lr_wsd_decay_style", "linear"),
        weight_decay=told["start_wd"],
        weight_decay_end=told["end_wd"] if told["wd_incr_style"] != "constant" else 0.0,
        weight_decay_schedule=told["wd_incr_style"],
    )
    where = lengths(
        warmup=told["lr_warmup_steps"],
        decay=told["lr_decay_steps"],
        wsd=told.get("wsd_decay_steps", 0),
        weight=told["wd_incr_steps"],
    )
    return section, where


def compare(tables: dict[str, Any]) -> int:
    """Every row of every table: the first two groups are decayed parameters and others."""
    rows = 0
    for name, table in tables.items():
        section, where = theirs(table)
        for count, lr, decay in table["rows"]:
            found = learning_rate(section, where, before=count, after=count + 1)
            assert found == pytest.approx(lr[0], rel=1e-12), (name, count)
            found = weight_decay(section, where, before=count)
            assert found == pytest.approx(decay[0], rel=1e-12, abs=1e-16), (name, count)
            rows += 1
    return rows


def test_megatrons_tables(oracles):
    tables = json.loads((oracles / "oracle" / "model" / "schedules.json").read_text())
    assert len(tables) == 25
    assert compare(tables) > 2000


def test_numbers_worked_out_by_hand():
    """The same comparison where the oracle is not at hand; tests/golden/README.md says where the numbers are from."""
    assert compare(json.loads(GOLDEN.read_text())) > 40
