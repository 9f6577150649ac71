"""Threads that read ahead: in order, bounded, errors at their place, and no thread left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.errors import BadInputError
from mdata.sources.chunk import chunks
from mdata.sources.record_batch import ReadSpec
from mdata.util.background import BackgroundIterator
from tests.helpers.examples import examples
from tests.helpers.processes import wait_until
from tests.mdata.sources.inputs import ENDINGS, find_files, write

SPEC = ReadSpec()


def iterate(compute, *, weight, limit):
    return BackgroundIterator(compute, weight=weight, limit=limit, name="mdata-read-ahead")


def ours():
    return [thread for thread in threading.enumerate() if thread.name == "mdata-read-ahead"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert ours() == []


def counting(limit, given_items, error=None):
    def compute(stopped):
        for number in range(limit):
            given_items.append(number)
            yield number
        if error is not None:
            raise error

    return compute


@examples(50)
@given(limit=st.integers(0, 20), budget=st.integers(1, 30), taken=st.integers(0, 25), fails=st.booleans())
def test_items_come_in_order_and_the_error_after_them(limit, budget, taken, fails):
    ahead = iterate(counting(limit, [], KeyError("mine") if fails else None), weight=lambda _: 5, limit=budget)
    found = []
    try:
        found.extend(item for _, item in zip(range(taken), ahead, strict=False))
        assert taken <= limit or not fails
    except KeyError:
        assert fails and taken > limit
    assert found == list(range(min(limit, taken)))
    ahead.close()
    assert ours() == []


def test_no_more_waits_than_the_budget_allows():
    computed = []
    ahead = iterate(counting(1000, computed), weight=lambda _: 10, limit=45)
    wait_until(lambda: len(computed) == 5)  # four wait, one more is in the thread's hands
    time.sleep(0.02)
    assert len(computed) == 5
    assert next(ahead) == 0
    wait_until(lambda: len(computed) == 6)
    ahead.close()
    assert len(computed) == 6


def test_an_item_larger_than_the_budget_passes():
    ahead = iterate(counting(3, []), weight=lambda _: 1000, limit=1)
    assert list(ahead) == [0, 1, 2]
    assert list(ahead) == []
    ahead.close()


@pytest.mark.parametrize("how", ["closed", "collected", "exhausted", "raised in the loop"])
@pytest.mark.parametrize("after", [0, 1, 7])
def test_chunks_leave_no_thread(tmp_path, how, after):
    files = [write(tmp_path, b"text\n" * 9000, c, name=f"{c}.jsonl") for c in ENDINGS]
    stream = chunks(files, 1000, spec=SPEC)
    for _ in range(after):
        next(stream)
    if how == "exhausted":
        assert len(list(stream)) == 45 * 5 - after
    elif how == "closed":
        stream.close()
    elif how == "collected":
        del stream
        gc.collect()
    else:
        with pytest.raises(ZeroDivisionError):
            _fail_inside(stream)


def _fail_inside(stream):
    for _ in stream:
        raise ZeroDivisionError


def test_an_error_comes_in_its_place_and_ends_all_threads(tmp_path):
    files = [write(tmp_path, b"text\n" * 9000, "gzip", name=name) for name in ("a", "b", "c")]
    data = files[1].path.read_bytes()
    files[1].path.write_bytes(data.rstrip(b"\0")[:-1])
    seen = []
    with pytest.raises(BadInputError, match=r"b\.gz: the gzip data is damaged after 45000 bytes of text"):
        for chunk in chunks(files, 1000, spec=SPEC):
            seen.append((chunk.file_number, chunk.number))
    assert [number for file, number in seen if file == 0] == list(range(45))
    assert {file for file, _ in seen} <= {0, 1}


def test_several_streams_are_unpacked_at_once_and_no_more(tmp_path):
    files = [write(tmp_path, b"text\n" * 9000, "gzip", name=str(n)) for n in range(6)]
    files.insert(1, write(tmp_path, b"plain\n", name="plain"))
    stream = chunks(files, 100, spec=SPEC)
    assert ours() == []
    next(stream)
    assert len(ours()) == 4
    stream.close()


def test_waiting_for_standard_input_can_be_ended():
    reader, writer = os.pipe()
    kept = os.dup(0)
    os.dup2(reader, 0)
    try:
        os.write(writer, b"one\n" * 10)
        stream = chunks(find_files(["-"]), 8, spec=SPEC)
        timer = threading.Timer(0.05, os.write, (writer, b"two\n" * 20_000))
        timer.start()
        assert next(stream).data == b"one\n" * 2
        timer.join()
        stream.close()
    finally:
        os.dup2(kept, 0)
        for descriptor in (kept, reader, writer):
            os.close(descriptor)


def test_a_thread_that_waits_for_standard_input_ends_when_nobody_wants_it():
    reader, writer = os.pipe()
    kept = os.dup(0)
    os.dup2(reader, 0)
    try:
        from mdata.sources.chunk import _read_ahead

        (stdin,) = find_files(["-"])
        ahead = _read_ahead(stdin, 8, SPEC)
        assert len(ours()) == 1
        ahead.close()
    finally:
        os.dup2(kept, 0)
        for descriptor in (kept, reader, writer):
            os.close(descriptor)


AFTER_MAIN = """
import sys, threading, time
from mdata.util.background import BackgroundIterator

def compute(is_closed):
    begun.set()
    for number in range(5):
        threading.main_thread().join()
        yield number
    while endless and not is_closed():
        time.sleep(0.01)

def consume():
    print(list(BackgroundIterator(compute, limit=1, name="ours")), flush=True)

daemon, endless = sys.argv[1] == "daemon", sys.argv[2] == "endless"
begun = threading.Event()
threading.Thread(target=consume, daemon=daemon).start()
begun.wait()  # a thread cannot be started while the process ends
"""


@pytest.mark.parametrize(
    ("owner", "length", "printed"), [("other", "ends", "[0, 1, 2, 3, 4]\n"), ("daemon", "endless", "")]
)
def test_a_thread_goes_on_after_the_main_one_only_for_a_thread_that_the_process_waits_for(owner, length, printed):
    """Nothing is left out where another thread reads to the end; a daemon thread does not keep the process alive."""
    words = [sys.executable, "-c", AFTER_MAIN, owner, length]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
