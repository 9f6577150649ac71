from __future__ import annotations

import hashlib
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import _core
from mdata.array_cache.cache import Cache
from mdata.dataset.dataset_options import MegatronOrder
from mdata.errors import UsageError
from mdata.mixing.megatron_blend import SURPLUS, exhaustive, normalise, requests, weighted
from tests.helpers.examples import examples
from tests.reference import megatron_blend as twin

POSITIVE = st.floats(1e-9, 1e6) | st.integers(1, 9).map(float) | st.just(1e-300) | st.sampled_from([0.1, 0.25, 1 / 3])
HOSTILE = POSITIVE | st.just(0.0) | st.floats(-3, 3)


def hash_of(array):
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def raw(weights, num_samples):
    components, samples = np.empty(num_samples, np.int16), np.empty(num_samples, np.int64)
    _core.fill_blend(np.array(weights, np.float64), components, samples)
    return components, samples


@examples(150)
@given(st.lists(HOSTILE, min_size=1, max_size=90), st.integers(0, 250), st.booleans())
def test_the_weighted_fill_equals_the_twin(weights, num_samples, divided):
    if divided and sum(weights) > 0:
        weights = [weight / sum(weights) for weight in weights]
    components, samples = raw(weights, num_samples)
    assert (components.tolist(), samples.tolist()) == twin.weighted(weights, num_samples)


@examples(100)
@given(st.lists(st.integers(0, 8) | st.integers(0, 60), min_size=1, max_size=90))
def test_the_exhaustive_fill_equals_the_twin(sizes):
    blend = exhaustive(sizes)
    if sum(sizes):
        assert (blend.components.tolist(), blend.samples.tolist()) == twin.exhaustive(sizes)
    assert blend.counts(blend.num_samples) == tuple(sizes)


@examples(20)
@given(st.sampled_from(["random", "zipf", "square", "mixed", "near"]), st.integers(33, 400), st.integers(0, 99))
def test_many_components_equal_the_twin(kind, count, seed):
    drawn = np.random.RandomState(seed).rand(count)
    ranks = np.arange(1, count + 1)
    weights = {
        "random": drawn + 1e-6,
        "zipf": 1 / ranks,
        "square": 1 / ranks**2,
        "mixed": np.where(ranks <= 3, 100 + drawn, 0.5 + drawn),
        "near": 1 + 1e-9 * drawn,
    }[kind]
    shares = normalise(weights.tolist())
    components, samples = raw(shares, 600)
    assert (components.tolist(), samples.tolist()) == twin.weighted(shares, 600)


@given(st.lists(POSITIVE, min_size=1, max_size=300), st.integers(0, 10**9), st.sampled_from([0.0, 0.005, 0.01]))
def test_requests_equal_the_twin(weights, num_samples, surplus):
    assert requests(weights, num_samples, surplus=surplus) == twin.requests(weights, num_samples, surplus=surplus)


def test_more_components_than_int16_holds_have_wider_numbers():
    blend = weighted([1] * 40_000, 80_000)
    assert blend.components.dtype == np.int32
    assert blend.components.tolist() == [*range(40_000), *range(40_000)]
    assert weighted([1] * 32_766, 1).components.dtype == np.int16
    with pytest.raises(OverflowError, match="more components"):
        raw([1.0] * 32_768, 1)


@given(st.lists(POSITIVE, min_size=1, max_size=12), st.integers(1, 300))
def test_it_deals_as_every_deal(weights, num_samples):
    blend = weighted(weights, num_samples)
    components, samples = blend.locate(np.arange(num_samples))
    assert (blend.inverse(components, samples) == np.arange(num_samples)).all()
    seen = [0] * len(weights)
    for k in range(num_samples):
        assert blend.counts(k) == tuple(seen)
        assert samples[k] == seen[components[k]]
        seen[components[k]] += 1
    for wrong in ((len(weights), 0), (-1, 0), (0, seen[0]), (0, -1)):
        with pytest.raises(IndexError, match=r"component|sample"):
            blend.inverse([wrong[0]], [wrong[1]])


def test_pickled_it_stays_the_same(tmp_path):
    for cache in (None, (Cache(str(tmp_path)), tmp_path / "corpus.json")):
        blend = weighted([0.3, 0.7], 1000, cache=cache)
        again = pickle.loads(pickle.dumps(blend))
        assert (again.components == blend.components).all()
        assert (again.samples == blend.samples).all()
    assert len(pickle.dumps(blend)) < 1000
    assert len([entry for entry in tmp_path.iterdir() if entry.name.startswith("megatron-blend")]) == 1


@pytest.mark.parametrize("weights", [[], [0.0, 1.0], [1.0, -1.0], [math.nan, 1.0], [math.inf, 1.0], [1e308, 1e308]])
def test_weights_that_mean_nothing_are_refused(weights):
    for function in (normalise, lambda w: weighted(w, 5), lambda w: requests(w, 5)):
        with pytest.raises(UsageError, match="finite and above 0"):
            function(weights)


def test_the_core_refuses_what_it_cannot_fill():
    places = np.empty(4, np.int16), np.empty(4, np.int64)
    for weights in ([], [math.nan], [math.inf], [1e308]):
        with pytest.raises(ValueError, match=r"finite|at least one"):
            _core.fill_blend(np.array(weights, np.float64), *places)
    with pytest.raises(ValueError, match="differ in size"):
        _core.fill_blend(np.ones(1), places[0], np.empty(3, np.int64))
    for sizes in ([5], [-1, 5]):
        with pytest.raises(ValueError, match=r"one place|negative"):
            _core.fill_blend_once(np.array(sizes, np.int64), *places)
    with pytest.raises(OverflowError, match="sum"):
        _core.fill_blend_once(np.array([2**62, 2**62], np.int64), *places)


def test_a_component_that_is_dealt_too_often_is_named_with_both_numbers():
    weights = [9.0, *[1.0] * 9]
    _, targets, built = requests(weights, 60)
    blend = weighted(normalise(weights), sum(targets))
    names = [f"c{i}" for i in range(10)]
    with pytest.raises(UsageError, match=r"samples of c0(.|\n)*32 samples taken, 31 there \(it was built for 31\)"):
        blend.check(built, names, requested=built)
    blend.check([32, *built[1:]], names)


def test_raw_oracles(oracles):
    folder = oracles / "oracle" / "blend"
    cases = json.loads((folder / "cases.json").read_text())
    stored = np.load(folder / "arrays.npz")
    for case in cases["cases"]:
        name, size = case["id"], case["size"]
        if case["function"] == "build_blending_indices":
            components, samples = raw(stored[f"{name}_weights"], size)
        else:
            blend = exhaustive(stored[f"{name}_sizes"].tolist())
            components, samples = blend.components, blend.samples
        assert hash_of(components) == case["dataset_index"]["sha256"], name
        assert hash_of(samples) == case["dataset_sample_index"]["sha256"], name


def test_request_oracles(oracles):
    cases = json.loads((oracles / "oracle" / "blend" / "cases.json").read_text())
    for case in cases["request_arithmetic"]:
        for at, size in enumerate(case["sizes"]):
            shares, targets, built = requests(case["weights"], size, surplus=case["surplus"])
            assert shares == case["normalised"]
            assert targets == [row[at] for row in case["target"]]
            assert built == [row[at] for row in case["buffer"]]


def test_the_surplus_of_the_options_is_that_of_the_blend():
    assert MegatronOrder().blend_surplus == SURPLUS
