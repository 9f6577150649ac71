from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import UsageError
from mdata.loader.batch_sizes import by_steps, constant, ramp_up, read_ramp


def schedule_of(case):
    if case["schedule"] == "ramp-up":
        start, increment, samples = case["rampup_batch_size"]
        return ramp_up(start, increment, samples=samples, size=case["global_batch_size"])
    if case["schedule"] == "constant":
        return constant(case["global_batch_size"])
    sizes = by_steps(case["text"], sequence_length=case["seq_length"])
    assert [list(entry) for entry in sizes.table] == case.get("parsed"), case
    return sizes


def rows_of(case, sizes):
    """Rows [step, consumed, size, size in force, microbatches], where something changes and the last."""
    rows, consumed = [], 0
    micro, dp_size = case["micro_batch_size"], case["data_parallel_size"]
    decrease = case.get("decrease_batch_size_if_needed", False)
    last = case.get("iterations", 3) - 1
    for step in range(last + 1):
        try:
            force = sizes.in_force(consumed, micro_batch=micro, dp_size=dp_size, decrease=decrease)
        except UsageError:
            return [*rows, [step, consumed, "refused"]]
        row = [step, consumed, sizes.at(consumed), force, force // (micro * dp_size)]
        if not rows or row[2:] != rows[-1][2:] or step == last:
            rows.append(row)
        consumed += force
    return rows


def test_oracles(oracles):
    cases = json.loads((oracles / "oracle" / "sampler" / "cases.json").read_text())["schedules"]
    for case in cases:
        if "raises" not in case:
            assert rows_of(case, schedule_of(case)) == case["rows"], case
        elif case["schedule"] == "constant":
            assert rows_of(case, schedule_of(case))[0][2] == "refused"
        else:
            with pytest.raises(UsageError, match="batch size"):
                schedule_of(case)
    assert len(cases) == 22


RAMPS = st.builds(
    lambda start, increment, steps, samples: ramp_up(start, increment, samples=samples, size=start + increment * steps),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 2000),
)


@given(RAMPS | st.integers(1, 99).map(constant) | st.just(by_steps("0:3 100:5 1k:7")), st.integers(0, 300))
def test_steps_follow_the_counter_alone(sizes, skipped):
    steps = list(itertools.islice(sizes.steps(), 320))
    first = steps[skipped][0]
    assert list(itertools.islice(sizes.steps(first), 10)) == steps[skipped : skipped + 10]
    assert [first for first, _ in steps] == [sizes.after(n) for n in range(320)]
    assert [first for first, _ in steps[skipped:]] == [sizes.after(n, consumed=first) for n in range(320 - skipped)]
    assert sorted(size for _, size in steps) == [size for _, size in steps]
    assert {size for _, size in steps} <= set(sizes.sizes)
    assert sizes.at(10**9) == sizes.sizes[-1]


@given(RAMPS | st.just(constant(3)) | st.just(by_steps("0:3 100:5 1k:7")), st.integers(0, 2500), st.integers(0, 900))
def test_the_steps_within_a_number_of_samples_read_no_further(sizes, target, consumed):
    steps = sizes.within(target, consumed=consumed)
    assert steps == 0 or sizes.after(steps, consumed=consumed) <= target
    assert sizes.after(steps + 1, consumed=consumed) > target


@given(RAMPS | st.just(constant(3)) | st.just(by_steps("0:3 100:5 1k:7")), st.integers(0, 2500), st.integers(0, 900))
def test_the_last_steps_before_a_sample(sizes, end, last):
    steps = [size for first, size in itertools.islice(sizes.steps(), 3000) if first + size <= end]
    before = [sizes.at(0)] * 900  # as if earlier steps had the first size
    assert sizes.last_steps(last, end=end) == sum([*before, *steps][len(before) + len(steps) - last :])


def test_steps_of_a_table_are_counted_without_going_through_them():
    """A table and a length that no loop could get through: the steps of one size are counted at once."""
    sizes = by_steps("0:1 1T:3 2T:2")
    last = 10**12 + 333_333_333_334 * 3  # the first multiple of 3 behind the first size that is no longer below 2T
    assert sizes.after(10**12) == 10**12 and sizes.after(10**12 + 2) == 10**12 + 6
    assert sizes.after(10**18) == last + 2 * (10**18 - 10**12 - 333_333_333_334)
    assert sizes.within(10**18) == 10**12 + 333_333_333_334 + (10**18 - last) // 2


@pytest.mark.parametrize("ramp", [(0, 1, 5, 9), (1, 0, 5, 9), (1, 1, 0, 9), (9, 1, 5, 9), (10, 1, 5, 9)])
def test_ramps_that_do_not_go_up_are_refused(ramp):
    start, increment, samples, size = ramp
    with pytest.raises(UsageError, match=r"does not increase(.|\n)*start"):
        ramp_up(start, increment, samples=samples, size=size)
    with pytest.raises(UsageError, match=r"whole steps of 8(.|\n)*batch of 72"):
        ramp_up(16, 8, samples=100, size=70)


@pytest.mark.parametrize("text", ["", "5", "x:1", "0:x", "0:1e999", "0:0", "5:16", "0:16 0:32", "0:-4", "0:nan"])
def test_tables_that_mean_nothing_are_refused(text):
    with pytest.raises(UsageError, match=f"found: '{text}'"):
        by_steps(text)
    with pytest.raises(UsageError, match="1 or more"):
        constant(0)


def test_a_ramp_is_read_as_it_is_written():
    assert read_ramp("16 8 1000", size=64) == ramp_up(16, 8, samples=1000, size=64)
    assert read_ramp(" ", size=64) == constant(64)
    for wrong in ("16 8", "16 8 1k", "16 8 -1", "16 8 1 1"):
        with pytest.raises(UsageError, match="three integers"):
            read_ramp(wrong, size=64)


def test_a_batch_that_cannot_be_dealt_names_the_numbers():
    with pytest.raises(UsageError, match=r"batch of 60 samples after 7 cannot(.|\n)*multiple of 16"):
        constant(60).in_force(7, micro_batch=8, dp_size=2)
    assert constant(60).in_force(7, micro_batch=8, dp_size=2, decrease=True) == 48
    with pytest.raises(UsageError, match="batch of 7 samples"):
        constant(7).in_force(0, micro_batch=8, dp_size=1, decrease=True)
    with pytest.raises(UsageError, match="0 ranks"):
        constant(7).in_force(0, micro_batch=8, dp_size=0)
