"""Reading ahead by a thread, with bounded memory, a clean end, and a word when the disk stalls.

A step is a list of parts; the thread reads the parts of the next steps while the consumer works on this one. At most
`ahead` + 2 steps are alive: those that wait, the one being read, and the consumer's. An error of the thread is raised
where the step would have come. The thread ends when the iterator is closed or collected, or when the main thread has
ended, which then waits for the part being read: a thread that Python stops in the middle of our C++ takes the whole
process down. It is no process, so that nothing is left when the process is killed. Not done here: what is read.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from mdata.progress import SILENT, Progress

Part = TypeVar("Part")
Read = TypeVar("Read")

# How often a thread that waits for room looks whether anybody still listens.
_POLL_S = 0.1
# The first word about a stalled disk comes after the patience, the next after twice as long, up to this.
_RAREST_S = 600.0


@dataclass(frozen=True)
class Reading(Generic[Part, Read]):
    """What is read ahead.

    Args:
        steps: the parts of each step.
        read: reads one part: what it adds to the step.
        place: says in words where a part lies, without touching the disk.
    """

    steps: Iterable[Iterable[Part]]
    read: Callable[[Part], list[Read]]
    place: Callable[[Part], str] = str


@dataclass
class Handed:
    """How many steps an iterator has handed out; whoever counts need not hold the iterator."""

    steps: int = 0


@dataclass
class _Shared(Generic[Part, Read]):
    """What the thread and the iterator both hold; the thread must not hold the iterator, or it is never collected.

    Args:
        waiting: steps that were read, in order, then what ended the walk.
        room: one None for each step that may still be put there; a queue, as these are in C and a semaphore is not.
    """

    waiting: queue.SimpleQueue[list[Read] | Exception] = field(default_factory=queue.SimpleQueue)
    room: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    closed: threading.Event = field(default_factory=threading.Event)
    part: Part | None = None

    @property
    def heard(self) -> bool:
        """Whether somebody may still ask for more."""
        return not self.closed.is_set() and threading.main_thread().is_alive()


class Prefetched(Iterator[list[Read]], Generic[Part, Read]):
    """An iterator that another thread walks ahead of us.

    Args:
        reading: what is read.
        ahead: steps that may wait.
        patience_s: seconds after which a consumer that waits is told what for.
        progress: who hears it.
        handed: counts the steps.
    """

    def __init__(
        self,
        reading: Reading[Part, Read],
        *,
        ahead: int,
        patience_s: float = 30.0,
        progress: Progress = SILENT,
        handed: Handed | None = None,
    ) -> None:
        self._handed = Handed() if handed is None else handed
        self._shared = _Shared[Part, Read]()
        for _ in range(ahead):
            self._shared.room.put(None)
        self._place, self._patience_s, self._progress = reading.place, patience_s, progress
        work = threading.Thread(target=_walk, args=(reading, self._shared), name="mdata-prefetch", daemon=False)
        work.start()

    def __iter__(self) -> Prefetched[Part, Read]:
        return self

    def __next__(self) -> list[Read]:
        if self._shared.closed.is_set():
            raise StopIteration
        item = self._wait()
        if isinstance(item, Exception):
            self.close()
            raise item
        self._handed.steps += 1
        return item

    def close(self) -> None:
        """End the thread; what it has read is dropped."""
        self._shared.closed.set()

    def __del__(self) -> None:
        self.close()

    def _wait(self) -> list[Read] | Exception:
        began, pause = time.monotonic(), self._patience_s
        while True:
            try:
                item = self._shared.waiting.get(timeout=pause)
            except queue.Empty:
                self._progress.note(f"waiting for data since {time.monotonic() - began:.0f} s: {self._where()}")
                pause = min(2 * pause, _RAREST_S)
                continue
            self._shared.room.put(None)
            if pause > self._patience_s:
                self._progress.note(f"the data came after {time.monotonic() - began:.0f} s")
            return item

    def _where(self) -> str:
        part = self._shared.part
        return "nothing is being read yet" if part is None else self._place(part)


def _walk(reading: Reading[Part, Read], shared: _Shared[Part, Read]) -> None:
    """Put steps, then whatever ended the walk, until nobody listens."""
    ending: Exception = StopIteration()
    try:
        for parts in reading.steps:
            step = _read_step(parts, reading.read, shared)
            if step is None or not _put(step, shared):
                return
    # Whatever it is, it belongs to the consumer: an error that dies with this thread would be a hang there.
    except Exception as error:
        ending = error
    _put(ending, shared)


def _read_step(
    parts: Iterable[Part], read: Callable[[Part], list[Read]], shared: _Shared[Part, Read]
) -> list[Read] | None:
    """None when nobody listens any more."""
    step: list[Read] = []
    for part in parts:
        if not shared.heard:
            return None
        shared.part = part
        step += read(part)
    return step


def _put(item: list[Read] | Exception, shared: _Shared[Part, Read]) -> bool:
    """Wait for room; False when the iterator was closed meanwhile, or nobody is left to ask for more."""
    while shared.heard:
        try:
            shared.room.get(timeout=_POLL_S)
        except queue.Empty:
            continue
        shared.waiting.put(item)
        return True
    return False
