"""Requests to stop: Ctrl-C and SIGTERM, and why none of them is lost inside a library.

Python runs a signal's handler between two instructions of the main thread. What the handler raises may therefore come
out of a library's call, a destructor or an import, each of which may drop it or turn it into an error of its own. So
our handlers raise and also remember: `raise_pending_stop` raises again what was lost. It is called after each call of a
library (`library_errors`) and between the pieces of long work. A request is no `Exception`, so that no handler of mdata
catches it to go on (tests/test_house_rules.py). Not done: to interrupt a library in the middle of a call.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Self

from mdata.errors import StoppedError

_WATCHED = (signal.SIGINT, signal.SIGTERM)


class RememberingHandler:
    """A signal handler that raises, and knows afterwards that it did.

    Args:
        request: makes what is raised; not an Exception.
    """

    def __init__(self, request: Callable[[], BaseException]) -> None:
        self.requested = False
        self._request = request

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """What Python calls."""
        self.requested = True
        self.raise_request()

    def raise_request(self) -> None:
        """Raise what was asked for, once more."""
        raise self._request()


@contextmanager
def stop_requests(stopped: Callable[[], StoppedError]) -> Iterator[None]:
    """While the block runs, SIGTERM raises what `stopped` makes and Ctrl-C KeyboardInterrupt, and both are remembered.

    The block does not end as if nothing had been asked: a request that something has dropped, or has made an error of,
    is raised at its end. Python's complaint about a destructor that drops one is left out. Signals that the process
    ignores (nohup) stay ignored, and in another thread than the main one nothing is watched.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    requests: dict[signal.Signals, Callable[[], BaseException]] = {
        signal.SIGINT: KeyboardInterrupt,
        signal.SIGTERM: stopped,
    }
    watched = {number: made for number, made in requests.items() if signal.getsignal(number) is not signal.SIG_IGN}
    before = {number: signal.getsignal(number) for number in watched}
    loud = sys.unraisablehook
    try:
        sys.unraisablehook = lambda dropped: None if _is_request(dropped.exc_value) else loud(dropped)
        for number, made in watched.items():
            signal.signal(number, RememberingHandler(made))
        yield
        raise_pending_stop()
    except Exception:
        raise_pending_stop()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = loud


def raise_pending_stop() -> None:
    """Raise a request to stop that has arrived. Threads get no signals, and the handlers of others are their own.

    Raises:
        KeyboardInterrupt, StoppedError: whatever the handler raises.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _WATCHED:
        handler = signal.getsignal(number)
        if isinstance(handler, RememberingHandler) and handler.requested:
            handler.raise_request()


def _is_request(error: BaseException | None) -> bool:
    return isinstance(error, KeyboardInterrupt | StoppedError)


class LibraryError(Exception):
    """What a library raised, in one line."""


class library_errors:
    """Around a call of a library: what it raises is a LibraryError; a request to stop is what it is.

    A class, because a generator costs too much around short calls.

    Args:
        kinds: what the library is known to raise; by default any Exception, and what Rust raises for a bug of its own.
        passed: kinds that are raised as they are.
        chars: how much is kept of what it says.

    Raises:
        LibraryError: one of the kinds was raised, and no request to stop is behind it.
        KeyboardInterrupt, StoppedError: one arrived meanwhile, whatever the library has made of it.
    """

    def __init__(
        self,
        *kinds: type[Exception],
        passed: tuple[type[Exception], ...] = (),
        chars: int = 200,
    ) -> None:
        self._kinds, self._passed, self._chars = kinds, passed, chars

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception) and not _is_panic(error):
            return
        raise_pending_stop()
        if error is not None and self._is_theirs(error):
            raise LibraryError(" ".join(str(error).split())[: self._chars] or type(error).__name__) from error

    def _is_theirs(self, error: BaseException) -> bool:
        if isinstance(error, self._passed):
            return False
        return _is_panic(error) or not self._kinds or isinstance(error, self._kinds)


def _is_panic(error: BaseException) -> bool:
    """Whether a library in Rust met a bug of its own; PyO3 gives that its own kind, which is no Exception."""
    return type(error).__name__ == "PanicException"
