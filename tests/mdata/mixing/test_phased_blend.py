"""Several phases: equal to the twin at every sample, close to the shares in every phase, exact at every end."""

from __future__ import annotations

import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.mixing.phased_blend import PhasedBlend, Segment
from tests.helpers.examples import examples
from tests.reference import phases as twin

BOUND = Fraction(168, 100)


@st.composite
def segments(draw, most=4):
    """Segments that ran to their end, were cut, or (the last) have no end; some components rest in some of them."""
    number = draw(st.integers(1, 6))
    parts = []
    for last in [False] * draw(st.integers(0, most - 1)) + [True]:
        weights = draw(st.lists(st.integers(0, 20), min_size=number, max_size=number).filter(any))
        endless = last and draw(st.booleans())
        whole = draw(st.booleans())
        length = None if endless else sum(weights) if whole else draw(st.integers(1, 2 * sum(weights)))
        parts.append((weights, length))
    return parts


def blend_of(parts) -> PhasedBlend:
    return PhasedBlend([Segment(np.array(weights, np.int64), length) for weights, length in parts])


@examples(60)
@given(segments())
def test_every_sample_equals_the_twin(parts):
    blend = blend_of(parts)
    num = 150 if blend.num_samples is None else blend.num_samples
    assert blend.num_samples == (None if parts[-1][1] is None else sum(length for _, length in parts))
    components, inside = blend.locate(np.arange(num))
    seen = [0] * len(parts[0][0])
    for k in range(num):
        assert list(blend.counts(k)) == seen
        assert (components[k], inside[k]) == (components[k], seen[components[k]])
        if k % 7 == 0:
            assert twin.locate(parts, k) == (components[k], inside[k])
            assert twin.counts(parts, k) == seen
        seen[components[k]] += 1
    assert (blend.inverse(components, inside) == np.arange(num)).all()


@examples(60)
@given(segments(), st.lists(st.integers(0, 2**61), min_size=1, max_size=5))
def test_far_away_samples_are_found_again(parts, ks):
    parts[-1] = (parts[-1][0], None)
    blend = blend_of(parts)
    components, inside = blend.locate(ks)
    assert blend.inverse(components, inside).tolist() == ks
    for k, component, sample in zip(ks, components.tolist(), inside.tolist(), strict=True):
        before, after = blend.counts(k), blend.counts(k + 1)
        assert sum(before) == k and before[component] == sample
        assert [b - a for a, b in zip(before, after, strict=True)] == [int(i == component) for i in range(len(after))]


@examples(60)
@given(segments())
def test_near_the_shares_inside_and_exact_at_the_end_of_every_phase(parts):
    blend = blend_of(parts)
    for number, (weights, length) in enumerate(parts):
        start = np.array(blend.counts(int(blend.starts[number])))
        for k in range(0, min(length or 60, 60) + 1):
            given_here = np.array(blend.counts(int(blend.starts[number]) + k)) - start
            for count, weight in zip(given_here.tolist(), weights, strict=True):
                assert abs(count - Fraction(k * weight, sum(weights))) < BOUND
        if length == sum(weights):
            assert (np.array(blend.counts(int(blend.starts[number]) + length)) - start).tolist() == weights


@examples(60)
@given(segments(), st.data())
def test_a_change_of_the_mixture_repeats_and_loses_nothing(parts, data):
    """Cut anywhere and go on otherwise: what was before the cut stays, every component goes on inside where it was."""
    old = blend_of(parts)
    at = data.draw(st.integers(1, min(old.num_samples or 200, 200)))
    kept, left = [], at
    for weights, length in parts:
        here = left if length is None else min(left, length)
        if here:
            kept.append((weights, here))
        left -= here
    new_weights = data.draw(st.lists(st.integers(0, 9), min_size=len(weights), max_size=len(weights)).filter(any))
    new = blend_of([*kept, (new_weights, None)])
    ks = np.arange(at + 60)
    components, inside = new.locate(ks)
    assert [part[:at].tolist() for part in (components, inside)] == [part.tolist() for part in old.locate(ks[:at])]
    for component in range(len(weights)):
        mine = inside[components == component]
        assert mine.tolist() == list(range(len(mine)))


def test_65536_components():
    weights = np.arange(1, 65_537)
    rest = np.zeros(65_536, np.int64)
    rest[::2] = 1
    blend = PhasedBlend([Segment(weights, int(weights.sum())), Segment(rest, 32_768), Segment(weights, None)])
    draw = np.random.default_rng(1)
    ks = np.concatenate([draw.integers(0, 2**60, 500), draw.integers(0, 2**31 + 98_304, 500)])
    components, inside = blend.locate(ks)
    assert (blend.inverse(components, inside) == ks).all()
    assert blend.counts(int(weights.sum())) == tuple(weights.tolist())


def test_what_it_does_not_have_is_refused():
    blend = blend_of([([1, 2], 3), ([0, 4], 4)])
    for samples in ([-1], [7], [0, 7]):
        with pytest.raises(IndexError, match="of a blend of 7"):
            blend.locate(samples)
    with pytest.raises(IndexError, match="8 samples of a blend of 7"):
        blend.counts(8)
    for component, sample in ((0, 1), (1, 6), (2, 0), (-1, 0), (0, -1)):
        with pytest.raises(IndexError, match="component"):
            blend.inverse([component], [sample])
    with pytest.raises(ValueError, match="differ in size"):
        blend.inverse([0, 1], [0])


def test_a_blend_may_end_before_its_segments_do():
    blend = PhasedBlend(blend_of([([1, 1], None)]).segments, 5)
    assert blend.num_samples == 5 and sum(blend.counts(5)) == 5
    with pytest.raises(IndexError, match="5"):
        blend.locate([5])
    with pytest.raises(IndexError, match="fewer samples than requested"):
        blend.inverse([0, 1], [9, 9])


def test_pickled_it_stays_the_same():
    blend = blend_of([([3, 5, 9], 17), ([1, 0, 1], 9)])
    again = pickle.loads(pickle.dumps(PhasedBlend(blend.segments, 20)))
    assert again.num_samples == 20
    assert (again.locate(range(20))[0] == blend.locate(range(20))[0]).all()


def test_where_the_mixture_changes():
    """A ramp counts whenever its shares have moved that far, however short its segments are."""
    shares = [(50, 50)] * 2 + [(50 - k, 50 + k) for k in range(1, 31)] + [(20, 80)]
    blend = PhasedBlend([Segment(np.array(pair, np.int64), 100) for pair in shares])
    assert blend.changes(0.1) == (0, 1100, 2100, 3100)
    assert blend.changes(0.5) == (0,)
    assert blend.changes(0.001) == (0, *range(200, 3200, 100)), "the last segment has the shares of the one before"
