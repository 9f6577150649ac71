"""The prefetching thread: errors surface, nothing hangs, nothing is left running."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import mdata
from mdata import DatasetOptions, Loader, UsageError
from mdata.loader.batch_sizes import by_steps
from mdata.loader.loader import BatchPlan
from tests.helpers.corpora import write_pair


@pytest.fixture
def dataset(tmp_path):
    wait_for_no_threads()  # those of other tests are about to end
    write_pair(tmp_path / "a", [[50]] * 10)
    return mdata.open_dataset(tmp_path / "a", DatasetOptions(sequence_length=8))


def threads() -> int:
    return sum(thread.name == "mdata-prefetch" for thread in threading.enumerate())


def wait_for_no_threads() -> None:
    deadline = time.monotonic() + 10
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() == 0


def test_the_thread_ends_when_the_iterator_is_dropped_or_closed(dataset):
    steps = iter(Loader(dataset, BatchPlan(2, 1)))
    next(steps)
    assert threads() == 1
    steps.close()
    wait_for_no_threads()
    with pytest.raises(StopIteration):
        next(steps)
    steps = iter(Loader(dataset, BatchPlan(2, 1)))
    next(steps)
    del steps
    gc.collect()
    wait_for_no_threads()


def test_an_error_of_the_thread_is_raised_in_its_place(dataset, monkeypatch):
    read = mdata.Dataset.read
    calls = []

    def failing(self, samples, **options):
        calls.append(samples)
        if len(calls) > 2:
            raise OSError(5, "Input/output error", "a.bin")
        return read(self, samples, **options)

    monkeypatch.setattr(mdata.Dataset, "read", failing)
    steps = iter(Loader(dataset, BatchPlan(2, 1), prefetch=4))
    next(steps)
    next(steps)
    with pytest.raises(OSError, match=r"a\.bin"):
        next(steps)
    with pytest.raises(StopIteration):
        next(steps)
    wait_for_no_threads()


def test_at_most_prefetch_steps_are_read_ahead(dataset, monkeypatch):
    read = mdata.Dataset.read
    calls = []
    monkeypatch.setattr(mdata.Dataset, "read", lambda *words, **named: (calls.append(words), read(*words, **named))[1])
    steps = iter(Loader(dataset, BatchPlan(2, 2), prefetch=2))
    next(steps)
    time.sleep(0.3)
    # One step was taken, two wait, one is in the thread's hand.
    assert len(calls) <= 4
    steps.close()


def test_a_finite_dataset_ends_with_its_last_whole_step(tmp_path):
    write_pair(tmp_path / "a", [[50]])
    dataset = mdata.open_dataset(tmp_path / "a", DatasetOptions(sequence_length=8, split="whole"))
    assert dataset.num_samples == 7
    steps = list(Loader(dataset, BatchPlan(3, 3)))
    assert sorted(np.concatenate([batch.samples for step in steps for batch in step]).tolist()) == list(range(6))
    wait_for_no_threads()


@pytest.mark.parametrize(
    ("plan", "options", "text"),
    [
        (BatchPlan(3, 2), {}, "not a multiple of microbatch 2"),
        (BatchPlan(4, 2, dp_size=3), {}, "not a multiple"),
        (BatchPlan(4, 2, dp_rank=1), {}, "dp rank 1 of 1"),
        (BatchPlan(0, 1), {}, "batch of 0 samples"),
        (BatchPlan(1, 1), {"consumed": -1}, "consumed -1"),
        (BatchPlan(1, 1), {"prefetch": 0}, "prefetch 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_at_once(dataset, plan, options, text):
    with pytest.raises(UsageError, match=text):
        Loader(dataset, plan, **options)


ENDS_AT_ONCE = """
import sys
from mdata import DatasetOptions, Loader, open_dataset
from mdata.loader.loader import BatchPlan
dataset = open_dataset(sys.argv[1], DatasetOptions(sequence_length=512))
batches = iter(Loader(dataset, BatchPlan(global_batch=4096, micro_batch=4096), prefetch=1000))
next(batches)
"""


def test_a_process_may_end_while_batches_are_read_ahead(tmp_path):
    """A thread that is in C++ when Python ends must not be stopped there: the process would be aborted."""
    write_pair(tmp_path / "long", [[100_000]])
    for _ in range(8):  # without the wait about every third was aborted
        done = subprocess.run(
            [sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path / "long")], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_steps_grow_by_the_plan_and_a_loader_goes_on_where_one_stopped(dataset):
    plan = BatchPlan(6, 1, sizes=by_steps("0:2 4:4 12:6"))
    steps = iter(Loader(dataset, plan))
    first = [next(steps) for _ in range(5)]
    steps.close()
    assert [len(step) for step in first] == [2, 2, 4, 4, 6]
    steps = iter(Loader(dataset, plan, consumed=8))
    for batch, again in zip(first[3], next(steps), strict=True):
        assert batch.samples.tolist() == again.samples.tolist()
        assert (batch.tokens == again.tokens).all()
    steps.close()
    with pytest.raises(UsageError, match="global batch 6 is not a multiple"):
        Loader(dataset, BatchPlan(4, 4, sizes=by_steps("0:4 8:6")))


def test_it_ends_where_the_samples_that_were_asked_for_do(tmp_path):
    wait_for_no_threads()
    write_pair(tmp_path / "a", [[50]] * 10)
    data = mdata.open(tmp_path / "a", sequence_length=8, num_samples=21)
    numbers = [[batch.samples.tolist() for batch in step] for step in Loader(data, BatchPlan(6, 3))]
    assert len(numbers) == 3 and sorted(n for step in numbers for batch in step for n in batch) == list(range(18))
    assert list(Loader(data, BatchPlan(6, 3), consumed=18)) == []
    assert len(list(Loader(data, BatchPlan(7, 7), consumed=7))) == 2


def test_a_state_counts_what_was_handed_out_by_the_newest_iterator(dataset):
    loader = Loader(dataset, BatchPlan(4, 2, sizes=by_steps("0:2 4:4")), consumed=2, prefetch=3)
    assert loader.state_dict()["consumed_samples"] == 2
    first = iter(loader)
    given = [next(first)[0].samples.tolist() for _ in range(3)]
    assert loader.state_dict() == {"consumed_samples": 12, "data_id": dataset.data_id, "seed": 1234}
    second = iter(loader)
    assert loader.state_dict()["consumed_samples"] == 2
    assert next(second)[0].samples.tolist() == given[0]
    next(first)
    assert loader.state_dict()["consumed_samples"] == 4
    loader.load_state_dict({**loader.state_dict(), "consumed_samples": 12})
    assert loader.state_dict()["consumed_samples"] == 12
    third = iter(loader)
    assert sorted(n for batch in next(third) for n in batch.samples.tolist()) == [12, 13, 14, 15]
    with pytest.raises(UsageError, match="a different data_id"):
        loader.load_state_dict({**loader.state_dict(), "data_id": "other"})
    assert loader.state_dict()["consumed_samples"] == 16
    for one in (first, second, third):
        one.close()
    wait_for_no_threads()


def test_a_loader_that_is_kept_does_not_keep_the_thread_of_a_loop_that_was_left(dataset):
    loader = Loader(dataset, BatchPlan(2, 1))
    for _ in loader:
        break
    gc.collect()
    wait_for_no_threads()
    assert loader.state_dict()["consumed_samples"] == 2
