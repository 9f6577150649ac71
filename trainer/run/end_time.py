"""Ends a run at a known time, with a checkpoint and exit code 75, before a time limit kills it.

`deadlines` reads the times from the settings and from Slurm's environment; `EndTime` notices on rank 0 that one has
come. Rank 0's clock decides for all: its vote is summed with a step, so that all ranks end after the same one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import NamedTuple

from trainer.config.sections import RunSection

MARGIN_S = 60.0  # before a time limit that kills, besides what a save and two steps take
STEPS = 32  # the slowest of these counts
ENDS = 2.0  # the least vote of rank 0 that ends the run; 1.0 asks for a checkpoint


class Deadline(NamedTuple):
    """A time at which a run ends.

    Args:
        at_s: seconds since 1970. why: "run.exit_at=...". kills: whether the run is killed at that time, so that the
            checkpoint must be complete before. is_last: whether no later start may pass it.
    """

    at_s: float
    why: str
    kills: bool = False
    is_last: bool = False


def parse_time(text: str) -> float:
    """Seconds since 1970 of run.exit_at; local time, unless the text has an offset.

    Raises:
        ValueError: it is not a date with a time.
    """
    if len(text.strip()) <= len("2026-11-26"):
        raise ValueError("a time is missing")
    return datetime.fromisoformat(text.strip()).timestamp()


def time_problems(run: RunSection, now_s: float) -> Iterator[str]:
    """Why a run cannot start with its run.exit_at. A pure function."""
    if run.exit_at is None:
        return
    try:
        passed = parse_time(run.exit_at) <= now_s
    except (ValueError, OverflowError):
        yield f'run.exit_at="{run.exit_at}" is not a date and a time; write it like "2026-11-26 18:00" or with "+01:00"'
        return
    if passed:
        yield f'run.exit_at="{run.exit_at}" has passed; choose a later time, or leave it out'


def deadlines(run: RunSection, env: Mapping[str, str], *, began_s: float) -> list[Deadline]:
    """The times at which a run ends, in an order that is the same on all ranks. A pure function.

    Args:
        env: with SLURM_JOB_END_TIME in a job of Slurm that has a time limit.
        began_s: when this start of the run began, seconds since 1970.
    """
    times = []
    if run.exit_at is not None:
        times.append(Deadline(parse_time(run.exit_at), f'run.exit_at="{run.exit_at}"', is_last=True))
    if run.exit_after is not None:
        times.append(Deadline(began_s + 60 * run.exit_after, f"run.exit_after={run.exit_after:g} minutes"))
    end = env.get("SLURM_JOB_END_TIME", "")
    if end.isdecimal() and int(end) > began_s:  # a job that was extended has the time of its first limit
        times.append(Deadline(float(end), "the time limit of the Slurm job", kills=True))
    return times


class EndTime:
    """Tells when the run ends, on the rank whose clock counts.

    Args:
        clock: seconds since 1970. seconds: of a clock that is never set, for the time of steps.
    """

    def __init__(
        self,
        deadlines: list[Deadline],
        clock: Callable[[], float] = time.time,
        seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self.deadlines, self._clock, self._seconds = deadlines, clock, seconds
        self._asked_s: float | None = None
        self._steps = deque[float](maxlen=STEPS)

    def margin_s(self, save_s: float) -> float:
        """How long before a time limit that kills the last save begins.

        Two steps: the one that is running, and the one that carries the vote. Saves differ, and other jobs that reach
        their limits may save at the same time.
        """
        return MARGIN_S + 2 * save_s + 2 * max(self._steps, default=0.0)

    def vote(self, save_s: float) -> float:
        """0.0, or ENDS and the number of the deadline that has come; asked once a step.

        Args:
            save_s: the longest time that a checkpoint took so far.
        """
        now, asked_s = self._clock(), self._seconds()
        if self._asked_s is not None:
            self._steps.append(asked_s - self._asked_s)
        self._asked_s = asked_s
        for number, (at_s, _, kills, _) in enumerate(self.deadlines):
            if now >= at_s - (self.margin_s(save_s) if kills else 0):
                return ENDS + number
        return 0.0

    def named(self, vote: float) -> Deadline | None:
        """The deadline that a vote names, on every rank; None: none."""
        number = int(vote - ENDS)
        if number < 0:
            return None
        return self.deadlines[number] if number < len(self.deadlines) else Deadline(0.0, "a time that rank 0 was given")
