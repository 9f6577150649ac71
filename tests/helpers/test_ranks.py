"""The pool of ranks: results in order, errors with their rank, hangs that end, and a usable pool after each of them."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch

from tests.helpers.ranks import RankContext, RankError, RankHang, run_ranks
from trainer.parallel.collectives import all_reduce_
from trainer.parallel.mesh import Mesh


def reduce_body(context: RankContext, scale: float) -> tuple[int, list[float]]:
    world = context.join()
    x = torch.full((3,), scale * (context.rank + 1), device=world.device)
    return context.rank, all_reduce_(x, world.groups["dp"]).tolist()


def axes_body(context: RankContext, tp: int) -> dict[str, tuple[int, int, list[float]]]:
    world = context.join(Mesh(context.world, tp))
    mine = float(10**context.rank)
    return {
        name: (axis.size, axis.rank, all_reduce_(torch.tensor([mine], device=world.device), axis).tolist())
        for name, axis in world.groups.items()
    }


def failing_body(context: RankContext) -> None:
    world = context.join()
    if context.rank == 1:
        raise RuntimeError("this rank breaks")
    all_reduce_(torch.ones(1, device=world.device), world.groups["dp"])  # waits for a rank that has gone


def lonely_body(context: RankContext) -> None:
    if context.rank == 0:
        meeting = f"{context.init_method}-of-nobody"
        torch.distributed.init_process_group(
            "gloo", init_method=meeting, rank=0, world_size=2, timeout=timedelta(seconds=1)
        )


def hanging_body(context: RankContext) -> None:
    if context.rank == 1:
        time.sleep(600)


def dying_body(context: RankContext) -> None:
    if context.rank == 0:
        os._exit(3)


def threads_body(context: RankContext) -> int:
    return torch.get_num_threads()


def test_results_come_in_rank_order():
    assert run_ranks(reduce_body, 3, 2.0) == [(rank, [12.0] * 3) for rank in range(3)]


def test_one_rank_runs_the_same_body():
    assert run_ranks(reduce_body, 1, 2.0) == [(0, [2.0] * 3)]


def test_each_axis_reduces_over_its_own_ranks():
    results = run_ranks(axes_body, 4, 2)
    assert [result["tp"] for result in results] == [
        (2, 0, [11.0]), (2, 1, [11.0]), (2, 0, [1100.0]), (2, 1, [1100.0]),
    ]  # fmt: skip
    assert [result["dp"] for result in results] == [
        (2, 0, [101.0]), (2, 0, [1010.0]), (2, 1, [101.0]), (2, 1, [1010.0]),
    ]  # fmt: skip
    assert [result["world"][2] for result in results] == [[1111.0]] * 4
    assert [result["pp"][0] for result in results] == [1] * 4


def test_an_exception_comes_back_with_its_rank_and_does_not_poison_the_pool():
    with pytest.raises(RankError, match=r"rank 1 of 2:\n(.|\n)*RuntimeError: this rank breaks"):
        run_ranks(failing_body, 2)
    assert run_ranks(reduce_body, 2, 1.0) == [(rank, [3.0] * 3) for rank in range(2)]


def test_a_rank_that_could_not_join_does_not_poison_the_pool():
    """It has counted a group that the others have not, and would look for them under another name."""
    with pytest.raises(RankError, match="rank 0 of 2:"):
        run_ranks(lonely_body, 2)
    assert run_ranks(reduce_body, 2, 1.0, timeout_s=30.0) == [(rank, [3.0] * 3) for rank in range(2)]


def test_a_hang_is_cut_and_says_where():
    with pytest.raises(RankHang, match=r"ranks \[1\] gave no answer(.|\n)*in hanging_body"):
        run_ranks(hanging_body, 2, timeout_s=2.0)
    assert run_ranks(reduce_body, 2, 1.0) == [(rank, [3.0] * 3) for rank in range(2)]


def test_a_death_is_told():
    with pytest.raises(RankError, match="rank 0 of 2:\nthe process died"):
        run_ranks(dying_body, 2)
    assert run_ranks(reduce_body, 2, 1.0) == [(rank, [3.0] * 3) for rank in range(2)]


def test_each_rank_has_one_torch_thread():
    assert run_ranks(threads_body, 2) == [1, 1]
