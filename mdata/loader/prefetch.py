"""Steps read ahead by a thread, with bounded memory, a clean end, and a note when the disk stalls.

A step is a list of parts; the thread reads the parts of the next steps while the consumer works on this one. At most
`ahead` + 2 steps are alive: those that wait, the one being read, and the consumer's. An error of the thread is raised
where the step would have come. The thread (mdata/util/background.py) looks between two parts whether it should end. It
is no process, so that nothing is left when the process is killed. Not done here: what is read.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from mdata.progress import SILENT, Progress
from mdata.util.background import BackgroundIterator, ClosedError

Part = TypeVar("Part")
Read = TypeVar("Read")

# The first note about a stalled disk comes after the patience, the next after twice as long, up to this.
_LONGEST_PAUSE_S = 600.0


@dataclass
class Reading(Generic[Part, Read]):
    """What is read ahead.

    Args:
        steps: the parts of each step.
        read: reads one part: what it adds to the step.
        describe: says in words where a part lies, without touching the disk.

    Attributes:
        part: the one that was begun last.
    """

    steps: Iterable[Iterable[Part]]
    read: Callable[[Part], list[Read]]
    describe: Callable[[Part], str] = str
    part: Part | None = None


@dataclass
class StepCount:
    """How many steps an iterator has given out; whoever counts need not hold the iterator."""

    steps: int = 0


class PrefetchIterator(Iterator[list[Read]], Generic[Part, Read]):
    """An iterator over steps that a thread reads ahead.

    Args:
        reading: what is read.
        ahead: steps that may wait.
        patience_s: seconds after which a note says what a waiting consumer waits for.
        progress: gets the notes.
        count: counts the steps.
    """

    def __init__(
        self,
        reading: Reading[Part, Read],
        *,
        ahead: int,
        patience_s: float = 30.0,
        progress: Progress = SILENT,
        count: StepCount | None = None,
    ) -> None:
        self._returned = StepCount() if count is None else count
        self._reading, self._patience_s, self._progress = reading, patience_s, progress
        self._steps = BackgroundIterator(partial(_read_steps, reading), limit=ahead, name="mdata-prefetch")

    def __next__(self) -> list[Read]:
        began, pause = time.monotonic(), self._patience_s
        while True:
            try:
                step = self._steps.take(pause)
            except queue.Empty:
                part = self._reading.part
                where = "nothing is being read yet" if part is None else self._reading.describe(part)
                self._progress.note(f"waiting for data since {time.monotonic() - began:.0f} s: {where}")
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                continue
            if pause > self._patience_s:
                self._progress.note(f"the data came after {time.monotonic() - began:.0f} s")
            self._returned.steps += 1
            return step

    def close(self) -> None:
        """End the thread at its next part, without waiting for it; what it has read is dropped."""
        self._steps.stop()


def _read_steps(reading: Reading[Part, Read], is_closed: Callable[[], bool]) -> Iterator[list[Read]]:
    for parts in reading.steps:
        step: list[Read] = []
        for part in parts:
            if is_closed():
                raise ClosedError
            reading.part = part
            step += reading.read(part)
        yield step
