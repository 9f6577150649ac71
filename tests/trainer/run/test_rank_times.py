"""How ranks differ: the summary, who holds up the others, and times that travel with heartbeats."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.helpers.ranks import run_ranks
from tests.trainer.run.test_profiling import run_in
from trainer.parallel.mesh import Mesh
from trainer.run.heartbeats import WatchedRanks
from trainer.run.log_text import step_text
from trainer.run.rank_times import RankTime, RankTimes, StepTimes, held_up_text, summary
from trainer.run.train import train
from trainer.run.watchdog import Watchdog

RANKS = {rank: RankTime(f"gpu{rank // 2:03}", StepTimes(0.5, 0.01, 0.15)) for rank in range(6)}


def test_the_slowest_three_are_named():
    ranks = {
        **RANKS,
        4: RankTime("gpu002", StepTimes(0.51, 0.2, 0.02)),
        1: RankTime("gpu000", StepTimes(0.52, 0.01, 0.1)),
    }
    found = summary(ranks)
    assert found["step_time_s"] | {"min": 0.5, "median": 0.5, "max": 0.52} == found["step_time_s"]
    assert [(x["rank"], x["host"]) for x in found["step_time_s"]["slowest"]] == [
        (1, "gpu000"),
        (4, "gpu002"),
        (0, "gpu000"),
    ]
    assert found["data_wait_s"]["slowest"][0] == {"rank": 4, "host": "gpu002", "value": 0.2}
    # The one that is waited for waits least.
    assert [x["rank"] for x in found["sync_s"]["slowest"]] == [4, 1, 0]
    assert held_up_text(found) == "rank 4 on gpu002 holds up 130 ms"
    assert step_text({"step": 1, "steps": 2, "ranks": found}) == "step 1/2 | rank 4 on gpu002 holds up 130 ms"
    assert held_up_text(summary(RANKS)) == ""
    json.dumps(found)


def test_times_travel_with_heartbeats():
    store, times = HashStore(), [RankTimes(mine=StepTimes(0.5, 0.1, 0.2)), RankTimes()]
    dogs = [
        Watchdog(
            WatchedRanks(rank=rank, world_size=2), store=store, end=lambda error: None, tick_s=0.02, times=times[rank]
        )
        for rank in (0, 1)
    ]
    with dogs[0], dogs[1]:
        times[1].mine = StepTimes(0.6, 0.0, 0.01)
        for _ in range(500):
            if len(times[0].ranks) == 2:
                break
            time.sleep(0.02)
    assert {rank: known.times for rank, known in times[0].ranks.items()} == {
        0: StepTimes(0.5, 0.1, 0.2),
        1: StepTimes(0.6, 0.0, 0.01),
    }
    assert times[0].ranks[1].host


def _train(context, config):
    times = RankTimes()
    train(config, context.join(Mesh(context.world)), ranks=times)
    return times.mine


def test_each_rank_knows_its_times(tmp_path):
    config = run_in(tmp_path)
    first, second = run_ranks(_train, 2, replace(config, train=replace(config.train, steps=3)))
    for mine in (first, second):
        assert 0 < mine.sync_s < mine.step_time_s and 0 <= mine.data_wait_s < mine.step_time_s
