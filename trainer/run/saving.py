"""When a checkpoint is due: at the end, every so many steps, every so many minutes, and when a run is asked to stop.

One that could not be written, because the state of that step was not sound, stays due until it is. Time is kept by
one rank, whose vote all ranks hear with the sums of the step (`Engine.step`), so that they decide alike and no
communication is added.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from trainer.config.sections import CheckpointSection


class SaveSchedule:
    """What is due, on one rank; every rank has one, and they agree.

    Args:
        settings: steps and minutes between checkpoints.
        keeps_time: whether this is the rank whose clock counts.
        clock: seconds, never going back.
    """

    def __init__(
        self, settings: CheckpointSection, *, keeps_time: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings, self._keeps_time, self._clock = settings, keeps_time, clock
        self._last = clock()
        self._pending = self._refused = False

    def vote(self) -> float:
        """1.0 where this rank says that it is time, else 0.0."""
        seconds = 60 * self._settings.minutes
        return float(self._keeps_time and seconds > 0 and self._clock() - self._last >= seconds)

    @property
    def pending(self) -> bool:
        """Whether a checkpoint is due that was not written yet."""
        return self._pending

    def hear(self, votes: Sequence[float]) -> None:
        """Take the sums over all ranks of `vote` and of requests to stop."""
        self._pending |= any(votes)

    def is_step(self, step: int) -> bool:
        """Whether the interval of steps asks for a checkpoint of this step."""
        return self._settings.interval > 0 and step % self._settings.interval == 0

    def due(self, step: int, *, last: bool) -> bool:
        """Whether a checkpoint of this step is to be written.

        Args:
            last: whether the run ends with it.
        """
        self._pending |= last or self.is_step(step)
        return self._pending

    def first_refusal(self) -> bool:
        """Whether what is due is put off for the first time since the last checkpoint; so that it is told once."""
        first, self._refused = not self._refused, True
        return first

    def saved(self) -> None:
        """A checkpoint was written."""
        self._last = self._clock()
        self._pending = self._refused = False
