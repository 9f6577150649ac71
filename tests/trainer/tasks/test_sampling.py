"""Each rule of choosing a token against a slow twin, and the laws that users rely on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mdata import DamageError, UsageError
from trainer.tasks.sampling import (
    Sampling,
    biased,
    choose,
    filtered,
    likeliest,
    penalized,
    top_p_at,
    uniform,
)

FREE = Sampling(temperature=1.0, top_p=1.0)


def slow_filtered(logits: list[float], rules: Sampling) -> list[int]:
    """The tokens that take part, by the definitions one after the other (the order of transformers)."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    scaled = {i: logits[i] / rules.temperature for i in order if logits[i] > -math.inf}
    kept = [i for i in order if i in scaled]
    if 0 < rules.top_k < len(kept):
        kept = [i for i in kept if scaled[i] >= scaled[kept[rules.top_k - 1]]]
    weight = {i: math.exp(scaled[i] - scaled[kept[0]]) for i in kept}
    if rules.top_p < 1:
        nucleus, reached = [], 0.0
        for i in kept:
            nucleus.append(i)
            reached += weight[i] / sum(weight[j] for j in kept)
            if reached >= rules.top_p:
                break
        kept = nucleus
    return [i for i in kept if weight[i] >= rules.min_p * weight[kept[0]]]


def slow_choice(logits: list[float], rules: Sampling, draw: float) -> int:
    """A point of the cumulative distribution of what takes part."""
    kept = slow_filtered(logits, rules)
    weights = [math.exp((logits[i] - max(logits)) / rules.temperature) for i in kept]
    target = draw * sum(weights)
    for token, weight in zip(kept, weights, strict=True):
        target -= weight
        if target < 0:
            return token
    return kept[-1]


def one(logits: list[float] | torch.Tensor, rules: Sampling, draw: float = 0.5, step: int = 0) -> int:
    row = torch.as_tensor(logits, dtype=torch.float64).unsqueeze(0)
    return int(choose(row, [rules], steps=[step], uniforms=[draw]))


LOGITS = st.lists(st.integers(-40, 40), min_size=1, max_size=8)
RULES = st.builds(
    Sampling,
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([0.1, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.07, 0.6, 1.0]),
)


@given(LOGITS, RULES, st.integers(0, 999))
def test_a_draw_equals_its_twin(steps, rules, thousandths):
    # Steps of an eighth and an odd draw: no sum lies so near a border that rounding decides.
    logits, draw = [x / 8 for x in steps], (thousandths + 0.123456) / 1000
    if rules.top_k == 1:
        assert one(logits, rules, draw) == logits.index(max(logits))
    elif rules.top_p not in _sums(logits, rules):
        assert one(logits, rules, draw) == slow_choice(logits, rules, draw)


def _sums(logits: list[float], rules: Sampling) -> list[float]:
    """The cumulative sums of what top-k leaves, where two ways of summing may differ in the last bit."""
    kept = slow_filtered(logits, replace(rules, top_p=1.0, min_p=0.0))
    weights = [math.exp((logits[i] - max(logits)) / rules.temperature) for i in kept]
    sums = [sum(weights[: n + 1]) / sum(weights) for n in range(len(kept))]
    return [rules.top_p if abs(x - rules.top_p) < 1e-12 else x for x in sums]


@given(st.lists(LOGITS.filter(lambda x: len(x) > 1), min_size=2, max_size=4), RULES)
def test_a_row_of_a_batch_equals_the_row_alone(rows, rules):
    width = max(map(len, rows))
    padded = torch.tensor([[*row, *[-math.inf] * (width - len(row))] for row in rows], dtype=torch.float64)
    draws = [uniform(1, i, 0) for i in range(len(rows))]
    mixed = [rules if i % 2 else replace(rules, temperature=0.0) for i in range(len(rows))]
    got = choose(padded, mixed, steps=[0] * len(rows), uniforms=draws).tolist()
    assert got == [one(row, mixed[i], draws[i]) for i, row in enumerate(padded)]


def test_a_small_nucleus_is_greedy_and_a_whole_one_draws_everything():
    logits = [0.0, 3.0, 1.0, 2.0]
    assert {one(logits, replace(FREE, top_p=1e-9), u / 50) for u in range(50)} == {1}
    assert {one(logits, FREE, u / 50) for u in range(50)} == {0, 1, 2, 3}


def test_the_nucleus_is_the_shortest_head_that_reaches_p():
    halves = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=torch.float64).log()
    for top_p, size in ((0.4, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.99, 4), (1.0, 4)):
        sizes = {"top_k_B": torch.tensor([0]), "top_p_B": torch.tensor([top_p]), "min_p_B": torch.tensor([0.0])}
        assert int(filtered(halves, temperature_B=torch.tensor([1.0]), **sizes)[2]) == size, top_p


def test_top_p_of_1_keeps_a_long_tail():
    many = torch.zeros(1, 5000)
    sizes = {"top_k_B": torch.tensor([0]), "top_p_B": torch.tensor([1.0]), "min_p_B": torch.tensor([0.0])}
    assert int(filtered(many, temperature_B=torch.tensor([1.0]), **sizes)[2]) == 5000


@pytest.mark.parametrize(
    "rules", [Sampling(temperature=0), Sampling(temperature=1e-300), Sampling(greedy=True), Sampling(top_k=1)]
)
def test_greedy_takes_the_lowest_of_equal_tokens(rules):
    assert {one([1.0, 7.0, 7.0, -math.inf], rules, u / 9) for u in range(9)} == {1}


def test_equal_logits_at_the_kth_place_all_stay():
    assert {one([0.0] * 10, replace(FREE, top_k=3), u / 30) for u in range(30)} == set(range(10))


def test_logits_that_are_no_numbers_are_refused():
    for row in ([math.nan, 1.0], [-math.inf, -math.inf]):
        with pytest.raises(DamageError, match="logits are not numbers"):
            likeliest(torch.tensor([row]))


def test_penalties_bias_and_blocks():
    logits = torch.tensor([2.0, -2.0, 1.0, 0.0])
    rules = Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    assert penalized(logits, rules, prompt=[0, 1], new=[2, 2]).tolist() == [1.0, -4.0, 0.5 - 1.0, 0.0]
    assert penalized(logits, Sampling(), prompt=[0], new=[1]) is logits
    least = Sampling(min_tokens=2)
    assert penalized(logits, least, prompt=[], new=[1], ends=[3]).tolist() == [2.0, -2.0, 1.0, -math.inf]
    assert penalized(logits, least, prompt=[], new=[1, 1], ends=[3]) is logits
    more = Sampling(logit_bias={1: 9.0, 0: -math.inf}, blocked_after={5: (2,)})
    assert biased(logits, more, last=4).tolist() == [-math.inf, 7.0, 1.0, 0.0]
    assert biased(logits, more, last=5).tolist() == [-math.inf, 7.0, -math.inf, 0.0]
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.0], "nothing is changed in place"


@given(st.floats(0.05, 1), st.floats(0, 1), st.floats(0, 1), st.integers(0, 12))
def test_the_decay_of_top_p_step_by_step(top_p, decay, part, steps):
    rules, slow = Sampling(top_p=top_p, top_p_decay=decay, top_p_bound=top_p * part), top_p
    for _ in range(steps):
        slow = max(slow * decay, rules.top_p_bound) if decay > 0 else slow
    assert top_p_at(rules, steps) == pytest.approx(slow, abs=1e-12)


def test_draws_depend_on_seed_request_sample_and_position_alone():
    seen = {uniform(s, r, p, sample=n) for s in (1, 2) for r in (0, 1) for p in (0, 1) for n in (0, 1)}
    assert len(seen) == 16 and all(0 <= x < 1 for x in seen)
    assert uniform(1234, 0, 0) == 0.6282534433174861, "texts of earlier versions stay what they were"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_tokens": 0}, "max_tokens=0 is below 1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9 is above max_tokens=8"),
        ({"temperature": -0.1}, "temperature=-0.1 is not"),
        ({"temperature": math.nan}, "temperature=nan is not"),
        ({"temperature": "1"}, "temperature='1' is not a number"),
        ({"top_k": 2.0}, "top_k=2.0 is not an integer"),
        ({"top_k": True}, "top_k=True is not an integer"),
        ({"top_k": -1}, "top_k=-1 is below 0"),
        ({"top_p": 0.0}, r"top_p=0\.0 is not in \(0, 1\]"),
        ({"top_p": 1.5}, r"top_p=1\.5"),
        ({"top_p": 0.5, "top_p_bound": 0.6}, r"top_p_bound=0\.6 is not in \[0, top_p=0\.5\]"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0\.0"),
        ({"frequency_penalty": math.inf}, r"frequency_penalty=inf is not in \[-10000, 10000\]"),
        ({"logit_bias": {3: math.nan}}, "logit_bias of 3 is nan"),
        ({"logit_bias": {3: 1e300}}, r"logit_bias of 3 is 1e\+300"),
        ({"logit_bias": {300: 1.0}}, r"logit_bias names token 300, the vocabulary has 300"),
        ({"stop": ("a", "")}, "an empty stop string"),
        ({"stop": "ab"}, "stop='ab' is not a tuple of strings"),
        ({"stop": ("a",) * 65}, "65 stop strings"),
        ({"greedy": 1}, "greedy=1 is not true or false"),
    ],
)
def test_options_out_of_range_are_refused(options, text):
    with pytest.raises(UsageError, match=text):
        Sampling(**options).check(300)
