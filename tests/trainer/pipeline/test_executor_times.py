"""The simulation against the executor: stages whose passes take given times, on ranks that exchange real messages.

The times are those of clocks that are only counted: each message brings the time of its sender, and a rank that waits
for it sets its clock to that. So they are exact, on however busy a machine.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.pipeline_bubble import Clock, run_timed
from tests.helpers.ranks import run_ranks
from trainer.parallel.mesh import Mesh
from trainer.pipeline.actions import Schedule
from trainer.pipeline.generators import SCHEDULES, default_chunks, make_schedule
from trainer.pipeline.lower import lower
from trainer.pipeline.simulate import Costs, Timeline, simulate

RANKS = 4


def _cases() -> list[tuple[Schedule, Costs]]:
    """Every schedule with equal stages and many microbatches, and with unequal ones, as many and fewer than ranks."""
    chance, cases = random.Random(3), []
    for name in SCHEDULES:
        for count in (3 * RANKS, RANKS, RANKS - 1):
            if name == "interleaved" and count % RANKS:
                continue
            schedule = lower(make_schedule(name, num_ranks=RANKS, num_microbatches=count))
            stages = schedule.num_stages
            given = [tuple(chance.randint(1, 12) / 4 for _ in range(stages)) for _ in range(3)]
            unequal = Costs(forward=given[0], inputs=given[1], weights=given[2])
            cases.append((schedule, Costs.equal(stages) if count > RANKS else unequal))
    return cases


def _run(context: Any) -> list[Any]:
    world = context.join(Mesh(RANKS, 1, pp=RANKS, ring=True))
    return [run_timed(world, schedule, costs, clock=Clock()) for schedule, costs in _cases()]


def test_the_executor_takes_the_simulated_times():
    """Every computation of every rank begins and ends at the simulated time; so the bubbles are those of the papers."""
    found = run_ranks(_run, RANKS)
    bubbles = {}
    for number, (schedule, costs) in enumerate(_cases()):
        timeline = Timeline(tuple(tuple(rank[number]) for rank in found))
        assert timeline == simulate(schedule, costs), schedule.name
        bubbles[schedule.name, schedule.num_microbatches] = timeline.bubble
    p, m = RANKS, 3 * RANKS
    papers = {"1f1b": 1, "gpipe": 1, "interleaved": default_chunks("interleaved"), "zb_h1": 3, "zb_v": 6}
    for name, share in papers.items():
        assert bubbles[name, m] == pytest.approx((p - 1) / (share * m)), name
