"""What CPython keeps for its next use is given back every EVERY requests."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.helpers.serving import running
from trainer.serve.free_lists import EVERY, FreeLists, freeze_loaded


@pytest.fixture(autouse=True)
def _no_other_collections() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_free_lists_are_emptied_with_the_hundredth_request():
    # Threads that earlier tests left behind allocate and free as well: hundreds of blocks, so no exact counts here.
    free_lists, kept = FreeLists(), 1000
    gc.collect()
    for _ in range(kept):
        tuple(number for number in range(18))
    before = sys.getallocatedblocks()
    free_lists.count(EVERY)
    assert sys.getallocatedblocks() < before - kept // 2


def test_a_count_begins_again():
    free_lists = FreeLists()
    free_lists.count(3 * EVERY)
    cycle = weakref.ref(_Cycle())
    free_lists.count(EVERY - 1)
    assert cycle() is not None
    free_lists.count(1)
    assert cycle() is None


def test_what_is_loaded_takes_no_part_in_collections():
    cycle = _Cycle()
    before, alive = gc.get_freeze_count(), weakref.ref(cycle)
    freeze_loaded()
    try:
        assert gc.get_freeze_count() >= before
        del cycle
        gc.collect()
        assert alive() is not None
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # as tests/conftest.py has it
    assert alive() is None


def test_server_and_rank_count_requests(served, monkeypatch):
    threads: list[int] = []
    monkeypatch.setattr("trainer.serve.free_lists.EVERY", 3)
    monkeypatch.setattr(
        "trainer.serve.free_lists.gc", SimpleNamespace(collect=lambda: threads.append(threading.get_ident()))
    )
    with running(served) as server:
        for _ in range(5):
            server.ask("/v1/completions", {"prompt": "a", "max_tokens": 1})
    assert len(threads) == 2 and len(set(threads)) == 2, "one collection of each"
