"""Iterators that are computed in threads of their own, a bounded number of bytes ahead of who takes from them.

What a computation raises is raised where its next item would have been taken. `close` ends the thread at its
next item and waits for it; nothing is left behind, whether the items were taken to the end, in part, or
not at all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """Raised inside a computation whose result nobody wants any more."""


class Ahead(Generic[T]):
    """The items of `compute(stopped)`, which runs in a thread and may ask `stopped()` while it waits.

    Args:
        compute: gives the items.
        weight: how many bytes an item holds.
        budget: how many bytes may wait to be taken; one item always may.
    """

    def __init__(
        self, compute: Callable[[Callable[[], bool]], Iterator[T]], *, weight: Callable[[T], int], budget: int
    ) -> None:
        self._compute = compute
        self._weight = weight
        self._budget = budget
        self._changed = threading.Condition()
        self._items: deque[T] = deque()
        self._held = 0
        self._closed = False
        self._ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mdata-read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._ended)
            if self._items:
                item = self._items.popleft()
                self._held -= self._weight(item)
                self._changed.notify_all()
                return item
            error, self._error = self._error, None
        if error is not None:
            raise error
        raise StopIteration

    def close(self) -> None:
        """End the thread, whatever it was about."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            for item in self._compute(self._is_closed):
                self._put(item)
        except Stopped:
            pass
        # The consumer's thread raises it.
        except BaseException as error:
            self._error = error
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _is_closed(self) -> bool:
        return self._closed

    def _put(self, item: T) -> None:
        weight = self._weight(item)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._items or self._held + weight <= self._budget)
            if self._closed:
                raise Stopped
            self._items.append(item)
            self._held += weight
            self._changed.notify_all()
