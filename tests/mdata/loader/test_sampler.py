from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import UsageError
from mdata.loader.batch_sizes import by_steps, constant, ramp_up
from mdata.loader.sampler import Sampler, global_batch, rank_rows
from mdata.mixing.native_blend import NativeBlend
from mdata.order.permutation import Permutation
from mdata.util.random_keys import derive_key
from tests.helpers.examples import examples

SIZES = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))


@given(st.integers(0, 10**15), st.integers(1, 64), st.integers(0, 9))
def test_a_batch_is_its_samples_in_another_order(first, size, seed):
    batch = global_batch(first, size, seed=seed)
    assert np.sort(batch).tolist() == list(range(first, first + size))
    assert (batch == global_batch(first, size, seed=seed)).all()


@pytest.mark.parametrize("size", [1, 2, 4096, 4097, 70_000])  # a table, and above 4,096 computed
def test_the_order_of_a_batch_is_a_permutation_of_its_own(size):
    key = derive_key("batch rows v1", 3, 100)
    expected = [100 + value for value in Permutation(size, key).forward(range(size)).tolist()]
    assert global_batch(100, size, seed=3).tolist() == expected


def test_known_answer():
    """Freezes the dealing of rows."""
    assert global_batch(8, 8, seed=1).tolist() == [13, 15, 11, 10, 9, 8, 12, 14]


def test_other_batches_and_seeds_have_other_orders():
    orders = {tuple(global_batch(f, 16, seed=s) - f) for f in range(0, 160, 16) for s in (1, 2)}
    assert len(orders) == 20


@given(SIZES, st.integers(0, 1000))
def test_ranks_share_a_batch_out_in_runs_of_a_microbatch(sizes, first):
    num_micro, dp_size, micro = sizes
    batch = global_batch(first, num_micro * dp_size * micro, seed=0)
    for r in range(dp_size):
        rows = rank_rows(batch, dp_rank=r, dp_size=dp_size, micro_batch=micro)
        assert rows.shape == (num_micro, micro)
        for m in range(num_micro):
            at = (m * dp_size + r) * micro
            assert rows[m].tolist() == batch[at : at + micro].tolist()


def test_no_component_sticks_to_a_rank():
    """Weights 1:1 alternate in the blend; unpermuted, each of two ranks would see one component only."""
    blend = NativeBlend([1, 1])
    seen = [0, 0]
    for step in range(100):
        batch = global_batch(2 * step, 2, seed=3)
        rows = rank_rows(batch, dp_rank=0, dp_size=2, micro_batch=1)
        seen[int(blend.locate(rows.ravel())[0][0])] += 1
    assert min(seen) > 25


@pytest.mark.parametrize("first, size", [(0, 0), (-1, 4), (3, -2)])
def test_impossible_batches_are_refused(first, size):
    with pytest.raises(UsageError, match=f"size {size}, first sample {first}"):
        global_batch(first, size, seed=0)


def test_a_batch_that_cannot_be_dealt_is_refused_with_the_numbers():
    with pytest.raises(UsageError, match=r"global batch 10 is not a multiple of microbatch 2 x 3 ranks(.|\n)*of 6"):
        rank_rows(np.arange(10), dp_rank=0, dp_size=3, micro_batch=2)
    with pytest.raises(UsageError, match="not a multiple"):
        rank_rows(np.arange(0), dp_rank=0, dp_size=1, micro_batch=1)


@pytest.mark.parametrize("rank, size, micro", [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0)])
def test_impossible_ranks_are_refused(rank, size, micro):
    with pytest.raises(UsageError, match=f"dp rank {rank} of {size}, microbatch {micro}"):
        rank_rows(np.arange(4), dp_rank=rank, dp_size=size, micro_batch=micro)


RAMPS = [constant(576), ramp_up(576, 576, samples=5000, size=2880), by_steps("0:576 600:1152 3k:1728")]


@examples(40)
@given(
    st.sampled_from(RAMPS), st.booleans(), st.integers(0, 4), st.lists(st.sampled_from([1, 2, 3, 8, 64]), min_size=1)
)
def test_the_order_is_the_same_for_any_ranks_and_after_any_resume(sizes, in_order, seed, dp_sizes):
    alone = Sampler(data_id="d", sizes=sizes, micro_batch=1, seed=seed, in_order=in_order)
    expected = itertools.islice(alone, 2 * len(dp_sizes))
    state = alone.state()
    # Each two steps by another number of ranks.
    for dp_size in dp_sizes:
        ranks = [replace(alone, micro_batch=3, dp_rank=r, dp_size=dp_size).restored(state) for r in range(dp_size)]
        for step in itertools.islice(zip(*ranks, strict=True), 2):
            assert np.stack(step, axis=1).ravel().tolist() == next(expected).ravel().tolist()
        state = json.loads(json.dumps(ranks[0].state(2)))
    assert state["consumed_samples"] == alone.state(2 * len(dp_sizes))["consumed_samples"]


def test_a_finite_dataset_ends_with_its_last_whole_step():
    sampler = Sampler(data_id="d", sizes=by_steps("0:2 4:3"), micro_batch=1, num_samples=12, in_order=True)
    assert [step.ravel().tolist() for step in sampler] == [[0, 1], [2, 3], [4, 5, 6], [7, 8, 9]]


def test_another_stream_is_refused_by_its_field():
    sampler = Sampler(data_id="mine", sizes=constant(4), micro_batch=1, seed=7)
    assert sampler.restored({"consumed_samples": 8, "data_id": "mine", "seed": 7}).consumed == 8
    for field, value in (("data_id", "theirs"), ("seed", 8), ("consumed_samples", -1), ("consumed_samples", True)):
        with pytest.raises(UsageError, match=rf"{field}(.|\n)*{value}"):
            sampler.restored(sampler.state(3) | {field: value})
        with pytest.raises(UsageError, match=rf"{field}(.|\n)*None"):
            sampler.restored({k: v for k, v in sampler.state(3).items() if k != field})


def test_sizes_of_later_steps_are_checked_at_the_beginning():
    with pytest.raises(UsageError, match="global batch 10 is not a multiple"):
        Sampler(data_id="d", sizes=by_steps("0:4 100:10"), micro_batch=2, dp_size=2).check()
    with pytest.raises(UsageError, match="-1 consumed"):
        Sampler(data_id="d", sizes=constant(4), micro_batch=2, consumed=-1).check()
