from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import UsageError
from mdata.loader.megatron_sampler import SamplerArgs, full_validation, random, sequential, torch_permutation

NUMBERS = st.tuples(st.integers(1, 200), st.integers(1, 5), st.integers(1, 5))


def lists_of(case, rank):
    args = SamplerArgs(
        total=case["total_samples"],
        consumed=case.get("consumed_samples", 0),
        micro_batch=case.get("micro_batch_size", 1),
        dp_rank=rank,
        dp_size=case["data_parallel_size"],
    )
    if case["sampler"] == "sequential":
        return sequential(args, drop_last=case["drop_last"])
    if case["sampler"] == "random":
        return random(args, sharded=case["data_sharding"])
    return full_validation(args)


def test_oracles(oracles):
    cases = json.loads((oracles / "oracle" / "sampler" / "cases.json").read_text())["samplers"]
    for case in cases:
        if "raises" in case:
            with pytest.raises(UsageError, match=r"consumed|less than one microbatch"):
                lists_of(case, 0)
            continue
        for rank, expected in enumerate(case["batches_per_rank"]):
            found = list(lists_of(case, rank))
            assert found[: len(expected)] == expected, case
            if case["total_samples"] < 1000:  # of the large one the first lists are told
                assert len(found) == len(expected), case
    assert len(cases) == 48


def test_torch_makes_the_same_permutations():
    torch = pytest.importorskip("torch")
    for size, seed in ((0, 0), (1, 3), (2, 0), (40, 1), (5000, 77), (100_003, 2**31)):
        generator = torch.Generator()
        generator.manual_seed(seed)
        assert torch_permutation(size, seed).tolist() == torch.randperm(size, generator=generator).tolist()
    with pytest.raises(UsageError, match="permutation of 214748364 samples"):
        torch_permutation(214_748_364, 0)


@given(NUMBERS, st.booleans(), st.integers(0, 3))
def test_an_epoch_resumed_anywhere_goes_on(numbers, sharded, epoch):
    total, micro, dp_size = numbers
    group = micro * dp_size
    if total < group:
        with pytest.raises(UsageError, match="less than one microbatch"):
            random(SamplerArgs(total=total, micro_batch=micro, dp_size=dp_size))
        return
    active = total // group * group
    seen = []
    for rank in range(dp_size):
        given = {"total": total, "micro_batch": micro, "dp_rank": rank, "dp_size": dp_size}
        whole = list(random(SamplerArgs(**given, consumed=epoch * active), sharded=sharded))
        assert len(whole) == active // group
        for done in range(len(whole)):
            rest = random(SamplerArgs(**given, consumed=epoch * active + done * group), sharded=sharded)
            assert list(rest) == whole[done:]
        seen += [number for part in whole for number in part]
    assert len(set(seen)) == len(seen) == active
    assert max(seen) < total


@given(NUMBERS, st.booleans())
def test_sequential_ranks_share_all_samples_in_order(numbers, drop_last):
    total, micro, dp_size = numbers
    ranks = [
        list(sequential(SamplerArgs(total=total, micro_batch=micro, dp_rank=r, dp_size=dp_size), drop_last=drop_last))
        for r in range(dp_size)
    ]
    joined = [number for step in zip(*ranks, strict=True) for part in step for number in part]
    assert joined == list(range(total // (micro * dp_size) * micro * dp_size if drop_last else total))


def test_what_cannot_be_dealt_is_refused_with_the_numbers():
    for wrong, told in (
        ({"total": 0}, "consumed of 0"),
        ({"total": 5, "consumed": -1}, "-1 samples consumed"),
        ({"total": 5, "micro_batch": 0}, "microbatch 0"),
        ({"total": 5, "dp_rank": 1}, "rank 1 of 1"),
    ):
        for sampler in (sequential, random, full_validation):
            with pytest.raises(UsageError, match=told):
                sampler(SamplerArgs(**wrong))
    with pytest.raises(UsageError, match="all 5 samples are consumed"):
        sequential(SamplerArgs(total=5, consumed=5))
    with pytest.raises(UsageError, match=r"7 consumed samples end inside a step of 4"):
        random(SamplerArgs(total=40, consumed=7, micro_batch=2, dp_size=2))


def test_the_order_is_that_of_the_epoch():
    first = np.array(list(random(SamplerArgs(total=64, micro_batch=2))))
    second = np.array(list(random(SamplerArgs(total=64, micro_batch=2, consumed=64))))
    assert sorted(first.ravel()) == sorted(second.ravel()) == list(range(64))
    assert (first != second).any()
