"""Stop requests: Ctrl-C and SIGTERM, handled so that none is lost inside a library.

Python runs a signal handler between two instructions of the main thread. An exception from the handler may therefore
come out of a library call, a destructor or an import, each of which may drop it or turn it into its own error. So our
handlers raise and also remember: `raise_pending_stop` raises a lost request again. It is called after each call of a
library (`library_errors`) and between the steps of long work. A request is not an `Exception`, so that no handler of
mdata catches it and continues (tests/test_house_rules.py). Not done: interrupting a library in the middle of a call.
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
    """A signal handler that raises, and remembers that it did.

    Args:
        request: makes the exception; not a subclass of Exception.
    """

    def __init__(self, request: Callable[[], BaseException]) -> None:
        self.requested = False
        self._request = request

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Called by Python."""
        self.requested = True
        self.raise_request()

    def raise_request(self) -> None:
        """Raise the request again."""
        raise self._request()


@contextmanager
def stop_requests(stopped: Callable[[], StoppedError]) -> Iterator[None]:
    """While the block runs, SIGTERM raises what `stopped` makes, Ctrl-C KeyboardInterrupt; both are remembered.

    A request that some code dropped, or turned into another error, is raised at the end of the block. Python's warning
    about a destructor that drops one is suppressed. Signals that the process ignores (nohup) stay ignored, and outside
    the main thread nothing is handled.
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
    """Raise a stop request that has arrived; only in the main thread, and only with our own handlers.

    Raises:
        KeyboardInterrupt, StoppedError: as the handler raises.
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
    """An error of a library, in one line."""


class library_errors:
    """Context around a library call: its errors become a LibraryError; stop requests stay stop requests.

    A class, because a generator costs too much around short calls.

    Args:
        kinds: exceptions that the library may raise; by default any Exception, and a panic in Rust.
        passed: exceptions that pass through unchanged.
        chars: how much of its message is kept.

    Raises:
        LibraryError: one of the kinds was raised, and not because of a stop request.
        KeyboardInterrupt, StoppedError: one arrived meanwhile, whatever the library raised.
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
    """Whether this is a panic of a Rust library; PyO3 raises its own type for it, which is not an Exception."""
    return type(error).__name__ == "PanicException"
