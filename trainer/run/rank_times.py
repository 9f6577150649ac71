"""How the ranks of a run differ: step time, waiting for other ranks, waiting for data; and which are slowest.

Each rank's times are sent with its heartbeats (watchdog.py), so that no step waits for them; rank 0 summarizes the
latest in metrics.jsonl. Step times are nearly equal, since ranks wait for each other: a slow rank is the one that waits
least. Pure, except for `RankTimes`, through which the two threads of a rank exchange values.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SHOWN = 3  # slowest ranks that are named
WORTH_NAMING = 0.1  # of a step's time that the others wait for one rank


class StepTimes(NamedTuple):
    """Mean times of a rank's last steps, in seconds.

    Args:
        step_time_s: of a step. data_wait_s: waiting for data in it.
        sync_s: from the end of its own backward passes to the end of the update: waiting for slower ranks, summing
            gradients, and the update, which takes the same everywhere.
    """

    step_time_s: float
    data_wait_s: float
    sync_s: float


class RankTime(NamedTuple):
    """The times of a rank, and where it runs."""

    host: str
    times: StepTimes


@dataclass(slots=True)
class RankTimes:
    """Times that a rank's main thread and its watchdog exchange; each replaces only its own value.

    Args:
        mine: of this rank; None: not measured yet. ranks: of all ranks, as far as known; on rank 0 only.
    """

    mine: StepTimes | None = None
    ranks: Mapping[int, RankTime] = field(default_factory=dict)


def summary(ranks: Mapping[int, RankTime]) -> dict[str, Any]:
    """Smallest, median and largest of each time, and the slowest ranks, worst first."""
    by_time: dict[str, Any] = {}
    for name in StepTimes._fields:
        values = {rank: getattr(of_rank.times, name) for rank, of_rank in ranks.items()}
        # The rank for which others wait waits least itself.
        worst = sorted(values, key=lambda rank: (values[rank] if name == "sync_s" else -values[rank], rank))
        by_time[name] = {
            "min": min(values.values()),
            "median": statistics.median(values.values()),
            "max": max(values.values()),
            "slowest": [{"rank": rank, "host": ranks[rank].host, "value": values[rank]} for rank in worst[:SHOWN]],
        }
    return by_time


def held_up_text(ranks: Mapping[str, Any]) -> str:
    """ "rank 5 on gpu003 holds up 120 ms", from a summary; empty if no rank holds the others up noticeably."""
    sync, step = ranks["sync_s"], ranks["step_time_s"]
    lost_s = sync["median"] - sync["min"]
    if lost_s < WORTH_NAMING * step["median"] or not lost_s:
        return ""
    first = sync["slowest"][0]
    return f"rank {first['rank']} on {first['host']} holds up {1e3 * lost_s:.0f} ms"
