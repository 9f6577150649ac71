"""The detector on made-up reports: what is a spike, what is none, and that limits depend on nothing but older steps."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest

from trainer.config.sections import SpikesSection
from trainer.run.spike_detector import MOST_IN_A_ROW, QUIET_STEPS, SpikeDetector
from trainer.run.step_report import NO_LIMITS, SpikeLimits, StepReport

BATCH = 4


def detector(*, mixtures=(0,), **settings) -> SpikeDetector:
    return SpikeDetector(SpikesSection(**{"window": 32, **settings}), mixtures)


def values(count: int, seed: int = 1) -> list[tuple[float, float]]:
    """Losses that fall, and skewed norms."""
    draw = random.Random(seed)
    return [(2 + 3 / (1 + i / 20) + draw.gauss(0, 0.05), math.exp(draw.gauss(-1, 0.3))) for i in range(count)]


def report(loss: float, norm: float, limits: SpikeLimits, **more) -> StepReport:
    return StepReport(loss, 100, norm, True, limits=limits, **more)


def run(found: SpikeDetector, numbers, *, first: int = 1, behind: int = 0):
    """(spikes, limits by step); `behind`: how many reports come later than on a CPU."""
    spikes, limits, waiting = [], {}, []

    def read():
        step, loss, norm = waiting.pop(0)
        spikes.append(found.add(step, (step - 1) * BATCH, report(loss, norm, limits[step])))

    for step, (loss, norm) in enumerate(numbers, first):
        limits[step] = found.limits(step, (step - 1) * BATCH)
        waiting.append((step, loss, norm))
        if len(waiting) > behind:
            read()
    while waiting:
        read()
    return [spike for spike in spikes if spike is not None], limits


def test_the_limit_is_the_median_and_the_deviation_of_the_values_above_it():
    """Slow twin: of the steps up to the last but one."""
    numbers = values(60)
    _, limits = run(detector(threshold=6.0), numbers)
    for step in range(1, 61):
        window = numbers[max(0, step - 2 - 32) : max(0, step - 2)]
        if len(window) < 16:
            assert limits[step] == NO_LIMITS
            continue
        for limit, least, column in zip(limits[step], (0.05, 3.0), zip(*window, strict=True), strict=True):
            middle = statistics.median(column)
            above = 1.4826 * statistics.median([value - middle for value in column if value >= middle])
            assert limit == middle + max(6.0 * above, least * middle)


@pytest.mark.parametrize("place", [(9.0, 0.4), (2.5, 40.0)])
def test_a_spike_of_either_number_is_found_once(place):
    numbers = values(60)
    numbers[49:52] = [place] * 3
    spikes, _ = run(detector(), numbers)
    assert [spike.step for spike in spikes] == [50, 51, 52]
    assert [spike.begins for spike in spikes] == [True, False, False]
    score = spikes[0].loss_z if place[0] > 5 else spikes[0].norm_z
    assert score is not None and score > 8


def test_another_one_later_begins_a_new_spike():
    numbers = values(120)
    numbers[49] = numbers[49 + QUIET_STEPS] = numbers[50 + 2 * QUIET_STEPS] = (9.0, 0.4)
    spikes, _ = run(detector(), numbers)
    assert [spike.begins for spike in spikes] == [True, False, True]


def test_reports_that_come_a_step_later_change_no_limit():
    """A GPU is given a step before the last one was read."""
    numbers = values(90)
    numbers[49:52] = [(9.0, 0.4)] * 3
    numbers[60:80] = [(7.0, 0.4)] * 20
    spikes, limits = run(detector(), numbers)
    assert run(detector(), numbers, behind=1) == (spikes, limits)


def test_a_run_that_resumes_at_any_step_has_the_same_limits():
    numbers = values(100)
    numbers[49:52] = [(9.0, 0.4)] * 3
    numbers[60:80] = [(7.0, 0.4)] * 20
    spikes, limits = run(detector(mixtures=(0, 85 * BATCH)), numbers)
    for stop in range(1, 100):
        first, second = detector(mixtures=(0, 85 * BATCH)), detector(mixtures=(0, 85 * BATCH))
        before = run(first, numbers[:stop])
        second.load(json.loads(json.dumps(first.to_numbers())))
        after = run(second, numbers[stop:], first=stop + 1)
        assert before[0] + after[0] == spikes
        assert before[1] | after[1] == limits


def test_a_new_level_is_no_spike_for_ever():
    numbers = values(260)[200:] + [(7.0, 0.4)] * 100
    spikes, limits = run(detector(window=64), numbers)
    assert [spike.step for spike in spikes] == list(range(61, 61 + MOST_IN_A_ROW + 1))
    assert limits[61 + MOST_IN_A_ROW + 2] == NO_LIMITS and 7 < limits[160].loss < 8


def test_another_mixture_begins_anew():
    numbers = values(60) + [(loss + 4, norm) for loss, norm in values(60)]
    spikes, limits = run(detector(mixtures=(0, 60 * BATCH)), numbers)
    assert not spikes
    assert [limits[step] == NO_LIMITS for step in (60, 61, 61 + 16, 61 + 18)] == [False, True, True, False]
    assert run(detector(), numbers)[0], "without being told, it is one"


def test_the_warmup_has_no_limits():
    found = detector()
    for step, (loss, norm) in enumerate(values(40), 1):
        assert found.limits(step, step * BATCH, warmup=True) == NO_LIMITS
        found.add(step, step * BATCH, report(loss, norm, NO_LIMITS))
    assert found.limits(41, 41 * BATCH) != NO_LIMITS


def test_what_is_not_finite_is_a_spike_unless_a_loss_scale_was_too_high():
    found = detector()
    _, limits = run(found, values(40))
    assert found.add(41, 160, report(math.nan, math.nan, limits[40])).begins
    assert found.add(42, 164, report(2.0, math.inf, limits[40], loss_scale=2.0**16)) is None
    nothing = StepReport(math.nan, 0, math.nan, False, limits=limits[40])
    assert found.add(43, 168, nothing) is None, "no token counted"
    assert all(math.isfinite(x) for row in found.to_numbers()["waiting"] for x in row)


def test_off_is_off():
    numbers = values(60)
    numbers[49] = (90.0, 40.0)
    spikes, limits = run(detector(action="off"), numbers)
    assert not spikes and set(limits.values()) == {NO_LIMITS}
