from __future__ import annotations

import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.mixing.native_blend import NativeBlend
from tests.helpers.examples import examples
from tests.reference import blend as twin

WEIGHTS = st.lists(st.integers(1, 50) | st.integers(1, 10**6), min_size=1, max_size=12)
WIDE = st.lists(st.integers(1, 2**58), min_size=1, max_size=12)
BOUND = Fraction(168, 100)


@examples(60)
@given(WEIGHTS)
def test_every_prefix_equals_the_twin_and_stays_near_its_share(weights):
    blend, tree = NativeBlend(weights), twin.build(weights)
    num = 300
    components, samples = blend.locate(np.arange(num))
    seen = [0] * len(weights)
    for k in range(num):
        assert blend.counts(k) == tuple(seen)
        assert twin.counts(tree, k) == dict(enumerate(seen))
        for count, weight in zip(seen, weights, strict=True):
            assert abs(count - Fraction(k * weight, sum(weights))) < BOUND
        assert twin.locate(tree, k) == (components[k], samples[k]) == (components[k], seen[components[k]])
        seen[components[k]] += 1
    assert (blend.inverse(components, samples) == np.arange(num)).all()


@examples(200)
@given(WIDE, st.lists(st.integers(0, 2**62), min_size=1, max_size=4))
def test_far_away_samples_equal_the_twin_and_invert(weights, ks):
    blend, tree = NativeBlend(weights), twin.build(weights)
    components, samples = blend.locate(ks)
    assert list(zip(components.tolist(), samples.tolist(), strict=True)) == [twin.locate(tree, k) for k in ks]
    assert blend.inverse(components, samples).tolist() == ks
    for k in ks:
        counts = blend.counts(k)
        assert dict(enumerate(counts)) == twin.counts(tree, k)
        assert sum(counts) == k
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - Fraction(k * weight, sum(weights))) < BOUND


@given(WEIGHTS, st.integers(0, 1000))
def test_counts_are_exact_at_multiples_of_the_sum(weights, times):
    assert NativeBlend(weights).counts(sum(weights) * times) == tuple(weight * times for weight in weights)


@given(WEIGHTS, st.integers(0, 10**9))
def test_a_components_sample_is_found_in_the_blend(weights, sample):
    blend = NativeBlend(weights)
    components = np.arange(len(weights))
    ks = blend.inverse(components, np.full(len(weights), sample))
    found, inside = blend.locate(ks)
    assert found.tolist() == components.tolist()
    assert set(inside.tolist()) == {sample}


def test_known_answers():
    """These freeze version 1 of the native blend."""
    components, samples = NativeBlend([7, 3]).locate(np.arange(10))
    assert components.tolist() == [0, 1, 0, 0, 1, 0, 0, 0, 1, 0]
    assert samples.tolist() == [0, 0, 1, 2, 1, 3, 4, 5, 2, 6]
    assert NativeBlend([1] * 5).locate(np.arange(5))[0].tolist() == [0, 2, 4, 3, 1]


SHAPES = {
    "equal": lambda n, rng: np.ones(n, np.int64),
    "zipf": lambda n, rng: 10**9 // np.arange(1, n + 1),
    "random": lambda n, rng: rng.integers(1, 10**6, n),
    "heavy": lambda n, rng: np.ceil(rng.pareto(0.7, n) * 1000).clip(1, 10**12).astype(np.int64),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_many_components_stay_near_their_shares_at_every_prefix(shape):
    """400 components at 3,000 prefixes; then at 40 places far away, where each count is asked for by itself."""
    weights = SHAPES[shape](400, np.random.default_rng(7))
    whole, blend = int(weights.sum()), NativeBlend(weights.tolist())
    components, _ = blend.locate(np.arange(3000))
    counts = np.cumsum(components[:, None] == np.arange(400), axis=0)
    far = np.abs(counts * whole - np.arange(1, 3001)[:, None] * weights)  # times whole: exact, and below 2^63
    assert Fraction(int(far.max()), whole) < BOUND
    assert _furthest(blend, weights, np.random.default_rng(8).integers(0, 2**60, 40)) < BOUND


def test_65536_components_stay_near_their_shares():
    """At prefixes short and long, each counted by itself."""
    rng = np.random.default_rng(9)
    weights = np.ceil(rng.pareto(1.0, 65_536) * 1000).clip(1, 10**9).astype(np.int64)
    prefixes = [1, 2, 65_536, int(weights.sum()) - 1, *rng.integers(1, 2**20, 20), *rng.integers(0, 2**60, 10)]
    assert _furthest(NativeBlend(weights.tolist()), weights, prefixes) < BOUND


def _furthest(blend: NativeBlend, weights: np.ndarray, prefixes) -> Fraction:
    """The largest distance of a component from its share at these prefixes."""
    whole, exact = int(weights.sum()), weights.astype(object)
    return max(Fraction(int(np.abs(np.array(blend.counts(int(k)), object) * whole - int(k) * exact).max()), whole)
               for k in prefixes)  # fmt: skip


def test_a_worse_tree_would_be_noticed():
    """Fibonacci weights make the deepest tree; the bound has little room there."""
    weights = [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144]
    components, _ = NativeBlend(weights).locate(np.arange(sum(weights)))
    counts = np.cumsum(components[:, None] == np.arange(len(weights)), axis=0)
    shares = np.arange(1, sum(weights) + 1)[:, None] * np.array(weights) / sum(weights)
    assert 0.5 < np.abs(counts - shares).max() < 1.68


def test_the_largest_sum_and_sample_are_taken_and_no_larger():
    half = 2**61
    assert NativeBlend([half, half]).counts(2**62) == (half, half)
    with pytest.raises(OverflowError, match="sum"):
        NativeBlend([half, half, 1])
    with pytest.raises(OverflowError, match="sample number"):
        NativeBlend([1, 1]).locate([2**62 + 1])
    with pytest.raises(OverflowError, match="sample number"):
        NativeBlend([1, half]).inverse([0], [3])


@pytest.mark.parametrize("weights", [[], [0], [1, 0, 2]])
def test_weights_must_be_positive(weights):
    with pytest.raises(ValueError, match=r"weight is 0|at least one"):
        NativeBlend(weights)


def test_entries_outside_are_refused():
    blend = NativeBlend([1, 2])
    for components, samples, told in (([2], [0], "component"), ([-1], [0], "negative"), ([0], [-1], "negative")):
        with pytest.raises(IndexError, match=told):
            blend.inverse(components, samples)
    with pytest.raises(IndexError, match="negative"):
        blend.locate([-1])
    with pytest.raises(ValueError, match="differ in size"):
        blend.inverse([0, 1], [0])


def test_pickled_it_stays_the_same():
    blend = NativeBlend([3, 5, 9])
    again = pickle.loads(pickle.dumps(blend))
    assert (again.locate(range(40))[0] == blend.locate(range(40))[0]).all()
