"""Work in a separate thread: in order, bounded, and finished when the block is left, whatever interrupts it."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.util.background import BackgroundWorker, map_files
from tests.helpers.examples import examples
from tests.helpers.processes import wait_until


@examples(50)
@given(items=st.lists(st.integers()), limit=st.integers(1, 5))
def test_every_item_is_worked_off_in_order_by_one_thread(items, limit):
    done, threads = [], set()

    def work(item: int) -> None:
        done.append(item)
        threads.add(threading.current_thread())

    with BackgroundWorker(work, limit=limit) as worker:
        for item in items:
            worker.put(item)
    assert done == items
    assert len(threads) <= 1 and threading.current_thread() not in threads


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_than_asked_wait(limit):
    """One is at work, `limit` wait: the next `put` returns only when one of them was taken."""
    given_items, go = [], threading.Semaphore(0)

    def giver() -> None:
        with BackgroundWorker(lambda item: go.acquire(), limit=limit) as worker:
            for item in range(10):
                worker.put(item)
                given_items.append(item)

    thread = threading.Thread(target=giver, daemon=True)
    thread.start()
    for allowed in range(limit + 1, 11):
        wait_until(lambda allowed=allowed: len(given_items) == allowed)
        time.sleep(0.01)
        assert len(given_items) == allowed
        go.release()
    go.release(limit + 1)
    thread.join(10)
    assert not thread.is_alive()


@examples(30)
@given(count=st.integers(1, 12), at=st.integers(0, 11), limit=st.integers(1, 4))
def test_a_failure_of_the_work_reaches_the_giver_and_ends_the_work(count, at, limit):
    done = []

    def work(item: int) -> None:
        if item == at:
            raise KeyError(item)
        done.append(item)

    def give_all() -> None:
        with BackgroundWorker(work, limit=limit) as worker:
            for item in range(count):
                worker.put(item)

    if at < count:
        with pytest.raises(KeyError, match=str(at)):
            give_all()
    else:
        give_all()
    assert done == list(range(min(at, count)))


def test_a_giver_that_waits_is_woken_by_a_failure():
    go = threading.Event()

    def work(item: int) -> None:
        go.wait()
        raise OSError(item)

    with pytest.raises(OSError, match="0"), BackgroundWorker(work, limit=1) as worker:
        worker.put(0)
        worker.put(1)
        threading.Timer(0.05, go.set).start()
        worker.put(2)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_leaving_by_an_error_works_off_what_was_given(kind):
    done = []

    def work(item: int) -> None:
        time.sleep(0.02)
        done.append(item)

    with pytest.raises(kind, match="of the giver"), BackgroundWorker(work, limit=5) as worker:
        for item in range(4):
            worker.put(item)
        raise kind("of the giver")
    assert done == [0, 1, 2, 3]


def test_the_first_of_two_errors_is_the_one_of_the_earlier_item():
    """What was given before the giver's error comes first, so what a run says does not depend on the threads."""

    def work(item: int) -> None:
        time.sleep(0.05)
        raise KeyError("bad row of an earlier piece")

    with pytest.raises(KeyError, match="earlier piece"), BackgroundWorker(work, limit=2) as worker:
        worker.put(0)
        raise ValueError("a later piece cannot be read")
    with pytest.raises(KeyboardInterrupt), BackgroundWorker(work, limit=2) as worker:
        worker.put(0)
        raise KeyboardInterrupt


@pytest.mark.parametrize("first", [None, KeyboardInterrupt, ValueError])
def test_ctrl_c_while_leaving_waits_for_the_work(first):
    """Who leaves reads the files next: nothing may still be at work on them, however often Ctrl-C is pressed."""
    done, main, all_given = [], threading.main_thread().ident, threading.Event()
    assert main == threading.get_ident()

    def work(item: int) -> None:
        all_given.wait()
        time.sleep(0.02)
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.05)
        done.append(item)

    def leave() -> None:
        with BackgroundWorker(work, limit=5) as worker:
            for item in range(3):
                worker.put(item)
            all_given.set()
            if first:
                raise first

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            leave()
        seen = list(done)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [0, 1, 2]


def test_a_failure_keeps_its_cause():
    def work(item: int) -> None:
        try:
            raise OSError("of the disk")
        except OSError as error:
            raise KeyError("of the work") from error

    def put_many() -> None:
        with BackgroundWorker(work, limit=1) as worker:
            while True:
                worker.put(0)

    with pytest.raises(KeyError, match="of the work") as found:
        put_many()
    assert str(found.value.__cause__) == "of the disk"


@pytest.mark.parametrize("count", [0, 3, 64, 65, 300])
def test_files_are_taken_in_turn_if_few_and_several_at_a_time_if_many(count):
    began, taken_by, meet = [], set(), threading.Barrier(2, timeout=60)

    def work(number):
        began.append(number)
        taken_by.add(threading.get_ident())
        if count > 64 and number < 2:
            meet.wait()  # ends only if two are at work at once
        return number * number

    assert map_files(work, range(count)) == [number * number for number in range(count)]
    # A pool, too, would usually begin them in turn.
    assert count > 64 or (began == list(range(count)) and taken_by <= {threading.get_ident()})


@pytest.mark.parametrize("count", [3, 300])
def test_an_error_of_a_file_is_raised(count):
    with pytest.raises(ZeroDivisionError):
        map_files(lambda number: 1 // (2 - number), range(count))
