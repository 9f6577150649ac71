"""Signals are remembered and handled between steps; a second Ctrl-C, or one when nothing can be lost, acts at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from mdata import StoppedError
from mdata.util.stop_signals import raise_pending_stop, stop_requests
from trainer.run.signals import StopRequests, StopVotes, stop


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As a command of ours has them; put back afterwards."""

    def stopped(number: int, frame: object) -> None:
        raise StoppedError("at once")

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, stopped)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "votes"), [(signal.SIGTERM, (1.0, 0.0)), (signal.SIGINT, (0.0, 1.0))])
def test_a_signal_is_remembered_and_handlers_are_put_back(number, votes):
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with StopRequests() as stops:
        assert stops.votes() == (0.0, 0.0)
        send(number)
        assert stops.votes() == votes
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.parametrize(("number", "votes"), [(signal.SIGTERM, (1.0, 0.0)), (signal.SIGINT, (0.0, 1.0))])
def test_a_request_that_was_dropped_before_is_heard_at_the_first_step(number, votes):
    """By an import, say, at the start: not only when the run has ended."""
    with pytest.raises(BaseException) as raised, stop_requests(lambda: StoppedError("stopped")):
        with suppress(BaseException):
            send(number)
        with StopRequests() as stops:
            assert stops.votes() == votes
        raise_pending_stop()
    assert type(raised.value) is (KeyboardInterrupt if number == signal.SIGINT else StoppedError)


def test_a_second_ctrl_c_acts_at_once_but_not_one_of_the_same_moment():
    clock = Clock()
    with StopRequests(clock) as stops:
        send(signal.SIGINT)
        clock.now = 0.9
        send(signal.SIGINT)
        assert stops.votes() == (0.0, 1.0)
        clock.now = 1.1
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_schedulers_may_repeat_sigterm():
    clock = Clock()
    with StopRequests(clock) as stops:
        for clock.now in (0.0, 0.1, 60.0):
            send(signal.SIGTERM)
        assert stops.votes() == (1.0, 0.0)


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, StoppedError), (signal.SIGINT, KeyboardInterrupt)])
def test_where_nothing_is_lost_signals_act_at_once(number, kind):
    with StopRequests() as stops:
        with pytest.raises(kind), stops.at_once():
            send(number)
        with pytest.raises(kind), stops.at_once():
            send(number)
        send(number)  # and are remembered again afterwards
        with pytest.raises(kind), stops.at_once():
            pytest.fail("the request that was remembered is heard first")


def test_ignored_signals_stay_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequests() as stops:
        send(signal.SIGINT)
        with stops.at_once():
            send(signal.SIGINT)
        assert stops.votes() == (0.0, 0.0)


def test_outside_the_main_thread_nothing_is_changed():
    found = []

    def work() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with StopRequests() as stops, stops.at_once():
            found.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True]


def test_the_run_ends_as_the_signal_asks_for():
    with pytest.raises(StoppedError, match="stopped by SIGTERM after step 3"):
        stop(StopVotes(2.0, 0.0), where="after step 3")
    with pytest.raises(KeyboardInterrupt):
        stop(StopVotes(2.0, 1.0), where="after step 3")
