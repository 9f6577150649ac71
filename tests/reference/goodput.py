"""Twin of trainer/run/goodput.py: where a run's time went, each second found by looking at all starts anew.

A line is kept if no later start went back before its step. Between a start and the last sign before it, the run was
being restarted, or, if it had finished, did not exist until the setup. The time in steps is tokens by their rate.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Facts = Mapping[str, Any]


def goodput(events: Sequence[Facts], lines: Sequence[Facts], *, sequence_length: int, background: bool) -> Facts:
    """The fields of `Goodput`, by name, of a run with at least one start."""
    starts = sorted((e for e in events if e["event"] == "start"), key=lambda e: float(e["time_s"]))
    first, signs = starts[0], [*events, *lines]
    began = first["time_s"] - first["setup_s"]
    found: dict[str, Any] = dict.fromkeys(("kept_s", "stall_s", "lost_s", "save_s"), 0.0)
    found["start_s"], found["starts"], found["lost_steps"] = first["setup_s"], len(starts), 0
    idle_s = 0.0
    for start, later in itertools.pairwise(starts):
        between = later["time_s"] - max(x["time_s"] for x in signs if x["time_s"] < later["time_s"])
        own = [e["event"] for e in events if start["time_s"] <= e["time_s"] < later["time_s"]]
        found["start_s"] += min(between, later["setup_s"]) if "finished" in own else between
        idle_s += max(0.0, between - later["setup_s"]) if "finished" in own else 0.0
        reached = [x["step"] for x in lines if start["time_s"] <= x["time_s"] < later["time_s"]]
        found["lost_steps"] += max(0, max([start["step"], *reached]) - later["step"])
    for line in lines:
        own = max((s for s in starts if s["time_s"] <= line["time_s"]), key=lambda s: float(s["time_s"]))
        before = [x for x in lines if own["time_s"] <= x["time_s"] < line["time_s"]]
        there = [x for x in lines if x["step"] == own["step"] and x["time_s"] < own["time_s"]]
        samples = max(before, key=lambda x: float(x["time_s"]))["consumed_samples"] if before else 0
        if not before and own["step"]:
            samples = there[-1]["consumed_samples"]
        seconds = (line["consumed_samples"] - samples) * sequence_length / line["tokens_per_s"]
        if any(s["time_s"] > line["time_s"] and s["step"] < line["step"] for s in starts):
            found["lost_s"] += seconds
        else:
            found["kept_s"] += seconds * (1 - line["data_wait"])
            found["stall_s"] += seconds * line["data_wait"]
    for event in events:
        if event["event"] == "save waited" or (event["event"] == "saved" and not background):
            found["save_s"] += event["seconds"]
    return {**found, "wall_s": max(x["time_s"] for x in signs) - began - idle_s}
