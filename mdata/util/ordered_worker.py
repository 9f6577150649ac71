"""Work that follows behind: a thread that takes items in their order while the caller gets the next ones.

Writing and hashing let go of Python's lock, so they run beside the thread that talks to workers. And since
signals reach the main thread only, Ctrl-C never cuts an append in half: it stops the giving, what was given
is still worked off, however often it is pressed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Behind(Generic[T]):
    """A context manager; leaving it waits until everything given was worked off.

    Args:
        work: called with each item, in order, in the thread. What it raises ends the work; the next `give`, or
            leaving, raises it again.
        ahead: how many items may wait.
    """

    def __init__(self, work: Callable[[T], None], *, ahead: int) -> None:
        self._work = work
        self._ahead = ahead
        self._waiting: deque[T] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._ended = False
        self._failure: BaseException | None = None
        # Daemon: an interpreter that must end, ends; a run that is cut off there is continued by its journal.
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        late = self._wait_for_the_end()
        if late is not None:
            raise late
        # The work failed on an item that was given before the giver met its own error.
        if self._failure is not None and (error is None or isinstance(error, Exception)):
            raise self._failure

    def give(self, item: T) -> None:
        """Hand over an item; waits while too many wait."""
        with self._changed:
            while len(self._waiting) >= self._ahead and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure
            self._waiting.append(item)
            self._changed.notify_all()

    def _wait_for_the_end(self) -> BaseException | None:
        """Never return while the thread is at work: files and counts are its own until then.

        What arrives meanwhile (Ctrl-C, again) is returned. Not `join`, which until Python 3.13 takes a thread
        for dead when it is interrupted (CPython issue 90882).
        """
        late: BaseException | None = None
        while True:
            try:
                with self._changed:
                    self._closed = True
                    self._changed.notify_all()
                    while not self._ended:
                        self._changed.wait()
                return late
            except BaseException as interruption:
                late = interruption

    def _run(self) -> None:
        try:
            self._work_off()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _work_off(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                item = self._waiting.popleft()
                self._changed.notify_all()
            try:
                self._work(item)
            # Whatever it is, it belongs to the thread that gives.
            except BaseException as failure:
                with self._changed:
                    self._failure = failure
                    self._waiting.clear()
                    self._changed.notify_all()
                return
