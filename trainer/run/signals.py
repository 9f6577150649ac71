"""Stop requests of a run: Ctrl-C and SIGTERM are remembered, and handled between steps.

A step is a transaction and a checkpoint is written by all ranks at once, so a signal must not end one rank in the
middle of either. What is unusual: repeated signals of one kind within a second count once, because a scheduler and the
launcher below it both send theirs; a second Ctrl-C after that ends the process at once, as it would without this
module, while another SIGTERM changes nothing. Signals that the process ignores (nohup) stay ignored. Before the first
step a signal need not wait for other ranks: `ArrivedSignals` shows it to the watchdog.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from mdata import StoppedError
from trainer.run.end_time import Deadline

SAME_REQUEST_S = 1.0  # between the signals of one request
HEARD = (signal.SIGTERM, signal.SIGINT)


class StopVotes(NamedTuple):
    """On one rank: 1.0 for a signal that it received; summed over all ranks: how many did."""

    sigterm: float = 0.0
    ctrl_c: float = 0.0


class StoppedAtTimeError(StoppedError):
    """The run ended at a known time; its launcher must not start it again in this job."""


class LastTimeError(StoppedAtTimeError):
    """The time was run.exit_at, which holds for later starts too."""


class StopRequests:
    """A context that collects the stop requests of the process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: dict[int, Any] = {}
        self._first: dict[int, float] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread():  # the owner of that handler also owns its signals
            for number in HEARD:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, self._hear)
                    # mdata's handlers remember what they raised: an import, for example, may have dropped it.
                    if getattr(self._before[number], "requested", False):
                        self._first.setdefault(number, self._clock())
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A block that may end at any point: signals, including those already received, have their default effect."""
        watched = set(self._before)
        self.__exit__()
        try:
            for number in watched & self._first.keys():
                signal.raise_signal(number)
            yield
        finally:
            if watched:
                self.__enter__()

    def votes(self) -> StopVotes:
        """The signals that were received, to be summed over all ranks."""
        return StopVotes(float(signal.SIGTERM in self._first), float(signal.SIGINT in self._first))

    def _hear(self, number: int, frame: FrameType | None) -> None:
        first = self._first.setdefault(number, self._clock())
        if number == signal.SIGINT and self._clock() - first > SAME_REQUEST_S:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)


class ArrivedSignals:
    """A context in which another thread can see signals that the main thread has not handled yet.

    Python calls handlers between two instructions of the main thread, which may wait inside a library for as long as
    the library's own time limit.
    """

    def __enter__(self) -> ArrivedSignals:
        self._read, self._write = socket.socketpair()
        for end in (self._read, self._write):
            end.setblocking(False)
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self._before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_main:
            signal.set_wakeup_fd(self._before)
        self._read.close()
        self._write.close()

    def newest(self) -> int | None:
        """The last request to stop since the previous call, or None."""
        try:
            numbers = self._read.recv(4096)
        except OSError:  # nothing has arrived, or the block has ended
            return None
        return next((number for number in reversed(numbers) if number in HEARD), None)


def stop(votes: StopVotes, *, where: str, deadline: Deadline | None = None) -> NoReturn:
    """End the run as the received signal requests.

    Args:
        votes: the sums over all ranks of `StopRequests.votes`; at least one is not 0, unless a time has come.
        where: the progress of the run, for the message. deadline: the one that has come.

    Raises:
        KeyboardInterrupt: Ctrl-C. StoppedError: SIGTERM. StoppedAtTimeError: the time.
    """
    if votes.ctrl_c:
        raise KeyboardInterrupt
    again = "run the same command again to continue"
    if votes.sigterm or deadline is None:
        raise StoppedError(f"stopped by SIGTERM {where}", fix=again)
    kind, later = (LastTimeError, "choose a later run.exit_at, and ") if deadline.is_last else (StoppedAtTimeError, "")
    raise kind(f"stopped at {deadline.why}, {where}", fix=later + again)
