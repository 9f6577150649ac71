"""Megatron's order: its own arrays by sha256, a slow twin, and the cases in which the original counts incorrectly."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import ResourceError, UsageError
from mdata._core import Mersenne, fill_sample_index
from mdata.order import megatron_order
from mdata.order.megatron_order import MegatronRequest, build, plan
from tests.conftest import oracle_folder
from tests.helpers.examples import examples
from tests.reference.megatron_order import indices
from tests.reference.mersenne import swap_onwards

# The original rounds the number of samples to single precision: (its samples, the right ones).
MISCOUNTED = {
    "g247": (537534, 537535),
    "g250": (1088797, 1088798),
    "g252": (9954715, 9954716),
    "g255": (4801691, 4801690),
}
FOLDER = oracle_folder() / "oracle/gpt_indices"


def cases(*, absent: bool = False) -> list[dict]:
    found = json.loads((FOLDER / "cases.json").read_text())["cases"] if FOLDER.is_dir() else []
    return [case for case in found if ("document_index" not in case) == absent]


def request(case: dict) -> MegatronRequest:
    first, stop = case["documents"]
    return MegatronRequest(
        first=first,
        stop=stop,
        sequence_length=case["sequence_length"],
        num_samples=case["num_samples"],
        seed=case["random_seed"],
        extra_token=case["add_extra_token_to_sequence"],
        keep_partial=case["split"] == "valid" and not case["drop_last_partial_validation_sequence"],
    )


@pytest.fixture(scope="module")
def lengths():
    with np.load(FOLDER / "lengths.npz") as stored:
        return {name.removesuffix("_uint16"): stored[name].astype(np.int32) for name in stored.files}


@pytest.mark.parametrize(
    "case", [case for case in cases() if case["id"] not in MISCOUNTED], ids=lambda case: case["id"]
)
def test_the_arrays_are_megatrons(oracles, lengths, case):
    made = build(lengths[case["corpus"]], request(case), threads=2)
    for name, array in (
        ("document_index", made.documents),
        ("sample_index", made.samples),
        ("shuffle_index", made.shuffle),
    ):
        wanted = case[name]
        assert (str(array.dtype), list(array.shape)) == (wanted["dtype"], wanted["shape"]), name
        assert hashlib.sha256(array.tobytes()).hexdigest() == wanted["sha256"], name


@pytest.mark.parametrize("case", [one for one in cases() if one["id"] in MISCOUNTED], ids=lambda case: case["id"])
def test_a_kept_partial_sample_is_counted_exactly(oracles, lengths, case):
    known = plan(case["tokens_per_epoch"], request(case))
    assert (case["length"], known.samples) == MISCOUNTED[case["id"]]
    inputs = case["num_epochs"] * case["tokens_per_epoch"] - case["add_extra_token_to_sequence"]
    assert 0 <= known.samples * case["sequence_length"] - inputs < case["sequence_length"]


def test_the_oracle_has_all_cases(oracles):
    assert (len(cases()), len(cases(absent=True))) == (298, 6)


@pytest.mark.parametrize("lengths", [[5, 0], [0, 5]])
def test_an_empty_document_beside_a_partial_sample_that_is_kept_is_as_in_the_twin(lengths):
    """Offset -1 in the original where the empty one is the last; tests/mdata/configurations.py draws the others."""
    asked = MegatronRequest(first=0, stop=2, sequence_length=3, num_samples=None, seed=0, keep_partial=True)
    made = build(np.array(lengths, np.int32), asked)
    expected = indices(lengths, (0, 2), wanted=None, q=3, seed=0, extra=1, keep=True)
    assert made.documents.tolist() == expected[0]
    assert list(map(tuple, made.samples.tolist())) == expected[1]
    assert made.shuffle.tolist() == expected[2]


def test_numbers_of_documents_have_64_bits_where_they_need_them():
    for first, dtype in ((0, np.int32), (2**31 + 5, np.int64)):
        request = MegatronRequest(first=first, stop=first + 3, sequence_length=4, num_samples=4, seed=1)
        found = megatron_order._documents(request, plan(9, request), Mersenne(1))
        assert found.dtype == dtype
        assert sorted(found.tolist()) == [first, first, first + 1, first + 1, first + 2, first + 2]


@examples(50)
@given(n=st.integers(0, 3000), seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(["int32", "int64", "uint32"]))
def test_the_shuffle_is_numpys(n, seed, dtype):
    ours, theirs = np.arange(n, dtype=dtype), np.arange(n, dtype=dtype)
    generator, numpys = Mersenne(seed), np.random.RandomState(seed)
    generator.shuffle(ours)
    numpys.shuffle(theirs)
    assert ours.tolist() == theirs.tolist()
    # And the generator stands where numpy's does.
    assert generator.up_to(10**12) == numpys.randint(0, 10**12 + 1, dtype=np.int64)


@examples(100)
@given(
    values=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60) | st.just(range(2000)),
    seed=st.integers(0, 2**32 - 1),
)
def test_swaps_onwards_equal_the_twin(values, seed):
    ours = np.array(values, np.int64)
    Mersenne(seed).swap_onwards(ours)
    assert ours.tolist() == swap_onwards(list(values), seed)


@examples(100)
@given(
    seed=st.integers(0, 2**32 - 1),
    weights=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12),
    low=st.integers(-(2**62), 2**62),
    span=st.integers(1, 2**62 - 1),
    p=st.floats(0.001, 0.333),
)
def test_the_other_draws_are_numpys(seed, weights, low, span, p):
    generator, numpys = Mersenne(seed), np.random.RandomState(seed)
    shares = np.array(weights) / np.sum(weights)
    bounds = np.cumsum(shares) / np.cumsum(shares)[-1]
    for _ in range(20):
        assert generator.real() == numpys.random_sample()
        assert generator.integer(low, low + span) == numpys.randint(low, low + span, dtype=np.int64)
        assert generator.pick(bounds) == numpys.choice(len(shares), p=shares)
        assert generator.geometric(p) == numpys.geometric(p)


@pytest.mark.parametrize(
    ("method", "values", "told"),
    [("integer", (3, 3), "empty range"), ("geometric", (0.34,), "p "), ("geometric", (0,), "p ")],
)
def test_draws_without_sense_are_refused(method, values, told):
    with pytest.raises(ValueError, match=told):
        getattr(Mersenne(1), method)(*values)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_threads_give_the_same_rows(threads):
    lengths = np.random.default_rng(0).integers(0, 5, 500_000).astype(np.int32)
    order = np.arange(len(lengths), dtype=np.int32)
    samples = (int(lengths.sum()) - 1) // 16
    one, many = (np.empty(2 * samples + 2, np.int32) for _ in range(2))
    fill_sample_index(lengths, order, 16, 1, 1, one)
    fill_sample_index(lengths, order, 16, 1, threads, many)
    assert (one == many).all()


def test_where_no_more_threads_are_to_be_had_one_gives_the_same_rows():
    """No room for the stack of another, as under a limit on memory or processes; in a process of its own."""
    program = """if True:
        import resource
        import numpy as np
        from mdata._core import fill_sample_index
        lengths, order = np.full(1 << 20, 16, np.int32), np.arange(1 << 20, dtype=np.int32)
        one, many = (np.zeros(2 * (len(order) + 1), np.int32) for _ in range(2))
        fill_sample_index(lengths, order, 16, 0, 1, one)
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (5 << 20),) * 2)
        fill_sample_index(lengths, order, 16, 0, 8, many)
        assert (one == many).all()
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_has_no_order_is_refused():
    asked = {"sequence_length": 4, "num_samples": 1, "seed": 0}
    for first, stop in ((0, 0), (1, 2)):
        with pytest.raises(UsageError, match="has no tokens"):
            build(np.array([5, 0], np.int32), MegatronRequest(first=first, stop=stop, **asked))
    with pytest.raises(UsageError, match="within 0 to 2"):
        build(np.array([5, 0], np.int32), MegatronRequest(first=0, stop=3, **asked))
    with pytest.raises(UsageError, match="seed"):
        plan(10, MegatronRequest(first=0, stop=1, sequence_length=4, num_samples=1, seed=-1))
    with pytest.raises(UsageError, match="2\\^62"):
        plan(10, MegatronRequest(first=0, stop=1, sequence_length=1 << 40, num_samples=1 << 30, seed=1))


def test_more_than_memory_has_is_refused_before_anything_is_made(monkeypatch):
    lengths = np.full(5000, 10, np.int32)
    asked = {"first": 0, "stop": 5000, "sequence_length": 64, "seed": 1}
    monkeypatch.setattr(megatron_order, "available_bytes", lambda: 1 << 36)
    with pytest.raises(ResourceError) as refused:
        build(lengths, MegatronRequest(num_samples=2**33, **asked))
    epochs = -(-(2**33 * 64 + 1) // 50_000)
    samples = (epochs * 50_000 - 1) // 64
    needed = 4 * 5000 * epochs + 16 * (samples + 1) + 8 * samples
    assert f"expected: {needed:,} bytes, for {5000 * epochs:,} documents of {epochs:,} epochs" in str(refused.value)
    assert "do not fit in memory: 8,589,934,592 samples of 64 tokens\n  found: " in str(refused.value)

    made = build(lengths, MegatronRequest(num_samples=None, **asked))
    needed = sum(array.nbytes for array in vars(made).values())
    monkeypatch.setattr(megatron_order, "available_bytes", lambda: needed)
    build(lengths, MegatronRequest(num_samples=None, **asked))
    monkeypatch.setattr(megatron_order, "available_bytes", lambda: needed - 1)
    with pytest.raises(ResourceError, match=f"one epoch of 64 tokens\n  found: {needed - 1:,} bytes available"):
        build(lengths, MegatronRequest(num_samples=None, **asked))
    monkeypatch.setattr(megatron_order, "available_bytes", lambda: None)
    build(lengths, MegatronRequest(num_samples=None, **asked))


@pytest.mark.parametrize(("part", "num_samples"), [(1000, None), (1_000_000, None), (1_000_000, 500_000)])
def test_memory_is_that_of_the_arrays(part, num_samples):
    """Of a mapped .idx, where nothing is aligned, not even the split's part is copied."""
    memory = np.zeros(4 * 1_000_000 + 34, np.uint8)
    lengths = memory[34:].view("<i4")
    assert not lengths.flags.aligned
    lengths[:] = 7
    tracemalloc.start()
    try:
        asked = MegatronRequest(first=0, stop=part, sequence_length=64, num_samples=num_samples, seed=1)
        made = build(lengths, asked, threads=2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    sizes = [array.nbytes for array in vars(made).values()]
    once = 4 * part if num_samples else 0
    assert peak <= max(sum(sizes), sizes[0] + once) + (1 << 18)


def test_bad_arrays_are_refused_by_the_core():
    lengths, rows = np.array([3, 4], np.int32), np.zeros(4, np.int32)
    with pytest.raises(IndexError, match="document number"):
        fill_sample_index(lengths, np.array([0, 2], np.int32), 2, 1, 1, rows)
    with pytest.raises(IndexError, match="document number"):
        fill_sample_index(lengths, np.array([-1, 0], np.int32), 2, 1, 1, rows)
    with pytest.raises(ValueError, match="sequence length"):
        fill_sample_index(lengths, np.array([0, 1], np.int32), 0, 1, 1, rows)
    with pytest.raises(ValueError, match="two numbers"):
        fill_sample_index(lengths, np.array([0, 1], np.int32), 2, 1, 1, rows[:3])
