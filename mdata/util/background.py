"""Background threads: `BackgroundIterator` computes items in advance, `BackgroundWorker` processes queued ones, and
`map_files` syncs many files at a time.

The first two use `BoundedQueue`, which limits how many items wait. An error in one thread is raised in the other, at
its place in the order. Signals reach only the main thread, so Ctrl-C never interrupts the background thread. What is
unusual: the queue is built from two queues implemented in C, because a signal handler may raise between any two lines
of Python and would leave a condition or semaphore locked.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")

# How often a thread that waits for space checks whether its items are still wanted.
_POLL_S = 0.1
_FEW_FILES, _FILES_AT_ONCE = 64, 16


class ClosedError(Exception):
    """Raised in a computation whose result is no longer wanted."""


class BoundedQueue(Iterator[T]):
    """Passes items from one thread to another, in order.

    Args:
        limit: how much may wait, in units of the items' weight. One item may always wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: queue.SimpleQueue[tuple[T, int] | BaseException] = queue.SimpleQueue()
        self._taken: queue.SimpleQueue[int] = queue.SimpleQueue()  # weights, back to the thread that puts
        self._waiting = 0  # weight that was put and is not known to be taken
        self.closed = self._finished = False
        self._owner = threading.current_thread()

    def put(self, item: T, weight: int = 1) -> None:
        """Add an item; waits for space.

        Raises:
            ClosedError: the consumer has closed the queue.
        """
        while self._waiting and self._waiting + weight > self._limit and not self.is_closed():
            with suppress(queue.Empty):
                self._waiting -= self._taken.get(timeout=_POLL_S)
        if self.is_closed():
            raise ClosedError
        self._waiting += weight
        self._items.put((item, weight))

    def finish(self, error: BaseException | None = None) -> None:
        """Declare that no more items will come, and why."""
        self._items.put(error or StopIteration())

    def get(self, timeout_s: float | None = None) -> T:
        """Take the next item; waits for it. Raises, once, the error with which the queue was finished.

        Raises:
            StopIteration: no more items. queue.Empty: none came in time.
        """
        if self._finished or self.closed:
            raise StopIteration
        item = self._items.get(timeout=timeout_s)
        if isinstance(item, BaseException):
            self._finished = True
            raise item
        self._taken.put(item[1])
        return item[0]

    __next__ = get

    def close(self) -> None:
        """Take no more items: the next `put` raises."""
        self.closed = True
        self._taken.put(0)

    def is_closed(self) -> bool:
        """Whether items are no longer taken: the queue was closed, or the process is about to end."""
        return self.closed or not (
            threading.main_thread().is_alive() or (self._owner.is_alive() and not self._owner.daemon)
        )


class BackgroundIterator(Iterator[T]):
    """The items of `compute(is_closed)`, which runs in its own thread and may call `is_closed()` while it waits.

    The thread ends at its next item when the iterator is closed or garbage collected, or when the process is about to
    end. The process waits for it: if Python stopped a thread inside our C++, the whole process would crash.

    Args:
        compute: yields the items.
        limit: how much may wait, in units of the items' weight; one item may always wait.
        weight: of an item.
        name: of the thread.
    """

    def __init__(
        self,
        compute: Callable[[Callable[[], bool]], Iterable[T]],
        *,
        limit: int,
        weight: Callable[[T], int] = lambda _: 1,
        name: str,
    ) -> None:
        self._queue: BoundedQueue[T] = BoundedQueue(limit)
        # The thread must not reference the iterator, or it is never garbage collected.
        self._thread = threading.Thread(target=_compute, args=(compute, weight, self._queue), name=name, daemon=False)
        self._thread.start()

    def __next__(self) -> T:
        return self._queue.get()

    def take(self, timeout_s: float) -> T:
        """The next item.

        Raises:
            StopIteration: there is none. queue.Empty: none came in time.
        """
        return self._queue.get(timeout_s)

    def stop(self) -> None:
        """Let the thread end at its next item, without waiting for it; there are no further items."""
        self._queue.close()

    def close(self) -> None:
        """End the thread, and wait for it."""
        self._queue.close()
        self._thread.join()

    def __del__(self) -> None:
        self._queue.close()


def _compute(
    compute: Callable[[Callable[[], bool]], Iterable[T]], weight: Callable[[T], int], items: BoundedQueue[T]
) -> None:
    try:
        for item in compute(items.is_closed):
            items.put(item, weight(item))
        if items.closed or not items.is_closed():
            items.finish()
    except ClosedError as error:
        # While the process ends, a daemon thread that takes items waits until Python stops it: an error would be
        # printed, and StopIteration would be wrong.
        if items.closed:
            items.finish(error)
    # Pass any error to the consumer: if it ended with this thread, the consumer would hang.
    except BaseException as error:
        items.finish(error)


class BackgroundWorker(Generic[T]):
    """A thread that processes items in order. Leaving the context waits until all queued items are processed.

    Args:
        work: called with each item, in the thread. An error ends the work; the next `put`, or leaving, raises it.
        limit: how many items may wait.
    """

    def __init__(self, work: Callable[[T], None], *, limit: int) -> None:
        self._work = work
        self._queue: BoundedQueue[T] = BoundedQueue(limit)
        self._ended = False
        self._end: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        # Daemon, so that the interpreter can always exit; a run that is cut off here is continued from its journal.
        self._thread = threading.Thread(target=self._run, name="mdata-worker", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        late = self._wait_for_the_end()
        if late is not None:
            raise late
        # The work failed on an item that was queued before the caller's own error.
        if self._failure is not None and (error is None or isinstance(error, Exception)):
            raise self._failure

    def put(self, item: T) -> None:
        """Queue an item; waits while too many are queued."""
        try:
            self._queue.put(item)
        except ClosedError as closed:
            failure = self._failure or closed
        else:
            return
        raise failure  # raised here, so that its cause and context are kept

    def _wait_for_the_end(self) -> BaseException | None:
        """Never return while the thread works: until then it owns files and counts.

        Returns an exception that arrives meanwhile (another Ctrl-C). Does not use `join`, which until Python 3.13
        treats a thread as dead when it is interrupted (CPython issue 90882).
        """
        late: BaseException | None = None
        while True:
            try:
                self._queue.finish()
                while not self._ended:
                    self._end.get()
                return late
            except BaseException as interruption:
                late = interruption

    def _run(self) -> None:
        try:
            for item in self._queue:
                self._work(item)
        # Pass any error to the thread that queues items.
        except BaseException as failure:
            self._failure = failure
            self._queue.close()
        finally:
            self._ended = True
            self._end.put(None)


def map_files(function: Callable[[T], R], files: Sequence[T]) -> list[R]:
    """Calls `function` for each file, several at a time if there are many: a disk syncs several nearly as fast as one.

    A few files are handled one by one, so that the order of calls to the disk is the same each time.
    """
    if len(files) <= _FEW_FILES:
        return [function(file) for file in files]
    with ThreadPoolExecutor(_FILES_AT_ONCE) as threads:
        return list(threads.map(function, files))
