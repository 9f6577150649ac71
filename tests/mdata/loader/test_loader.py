"""The loader: what it gives, its thread (errors surface, nothing hangs or is left running), its memory, its notes."""

from __future__ import annotations

import gc
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mdata
from mdata import Loader, UsageError
from mdata.loader.batch_sizes import by_steps
from mdata.loader.loader import BatchPlan, BufferPool, PrefetchIterator, Reading, describe_places
from mdata.progress import Silent
from tests.helpers.corpora import write_pair
from tests.helpers.examples import examples
from tests.helpers.open_by_keys import open_by_keys
from tests.helpers.processes import is_alive, wait_until


@pytest.fixture
def dataset(tmp_path):
    wait_until(lambda: threads() == 0)  # those of other tests are about to end
    write_pair(tmp_path / "a", [[50]] * 10)
    return mdata.open_dataset(tmp_path / "a", sequence_length=8)


def test_what_a_loader_looks_like(dataset):
    shown = repr(Loader(dataset, BatchPlan(8, 2, dp_rank=1, dp_size=2), consumed=16))
    assert shown.startswith("<mdata.Loader global batch 8, microbatch 2, rank 1 of 2, from sample 16, <mdata.Dataset ")
    growing = BatchPlan(0, 1, sizes=by_steps("0:2 4:6"))
    assert "global batch 2 to 6," in repr(Loader(dataset, growing))


def threads() -> int:
    return sum(thread.name == "mdata-prefetch" for thread in threading.enumerate())


def test_the_thread_ends_when_the_iterator_is_dropped_or_closed(dataset):
    steps = iter(Loader(dataset, BatchPlan(2, 1)))
    next(steps)
    assert threads() == 1
    steps.close()
    wait_until(lambda: threads() == 0)
    with pytest.raises(StopIteration):
        next(steps)
    steps = iter(Loader(dataset, BatchPlan(2, 1)))
    next(steps)
    del steps
    gc.collect()
    wait_until(lambda: threads() == 0)


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
    wait_until(lambda: threads() == 0)


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
    dataset = mdata.open_dataset(tmp_path / "a", sequence_length=8, split="whole")
    assert dataset.num_samples == 7
    steps = list(Loader(dataset, BatchPlan(3, 3)))
    assert sorted(np.concatenate([batch.samples for step in steps for batch in step]).tolist()) == list(range(6))
    wait_until(lambda: threads() == 0)


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
from mdata import Loader, open_dataset
from mdata.loader.loader import BatchPlan
dataset = open_dataset(sys.argv[1], sequence_length=512)
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
    wait_until(lambda: threads() == 0)
    write_pair(tmp_path / "a", [[50]] * 10)
    data = mdata.open_dataset(tmp_path / "a", sequence_length=8, num_samples=21)
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
    wait_until(lambda: threads() == 0)


def test_a_loader_that_is_kept_does_not_keep_the_thread_of_a_loop_that_was_left(dataset):
    loader = Loader(dataset, BatchPlan(2, 1))
    for _ in loader:
        break
    gc.collect()
    wait_until(lambda: threads() == 0)
    assert loader.state_dict()["consumed_samples"] == 2


class Notes(Silent):
    """Keeps what it hears; the disk comes back to life after so many notes."""

    def __init__(self, after: int, disk: threading.Event) -> None:
        self.heard: list[str] = []
        self._after, self._disk = after, disk

    def note(self, text: str) -> None:
        self.heard.append(text)
        if len(self.heard) == self._after:
            self._disk.set()


@pytest.fixture
def blend(tmp_path) -> mdata.Dataset:
    write_pair(tmp_path / "web", [[50]] * 10)
    write_pair(tmp_path / "code", [[40]] * 10)
    mdata.make_blend(["3", str(tmp_path / "web"), "1", str(tmp_path / "code")], tmp_path / "mix.json")
    return mdata.open_dataset(tmp_path / "mix.json", sequence_length=8)


class Row:
    """Something whose life can be watched."""


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("parts", [1, 4])
def test_no_more_than_ahead_and_two_steps_are_alive(ahead, parts):
    alive: weakref.WeakSet[Row] = weakref.WeakSet()
    most, number_read = 0, 0

    def read(part: int) -> list[Row]:
        nonlocal most, number_read
        row = Row()
        alive.add(row)
        most, number_read = max(most, len(alive)), number_read + 1
        return [row]

    steps = PrefetchIterator(Reading(([0] * parts for _ in range(40)), read), ahead=ahead)
    for taken in range(1, 41):
        step = next(steps)
        assert len(step) == parts
        # A slow consumer: all that may be read ahead is.
        wait_until(lambda taken=taken: number_read == parts * min(40, taken + ahead + 1))
        del step
    assert most <= parts * (ahead + 2)
    assert most >= parts * (ahead + 1)  # or nothing was read ahead, and this test shows nothing


def test_live_batches_of_a_loader_are_counted(blend, monkeypatch):
    alive: set[int] = set()
    made = most = 0
    init = mdata.Batch.__init__

    def noted(self, *arguments):
        nonlocal made, most
        init(self, *arguments)
        made += 1
        alive.add(made)
        weakref.finalize(self, alive.discard, made)
        most = max(most, len(alive))

    monkeypatch.setattr(mdata.Batch, "__init__", noted)
    steps = iter(Loader(blend, BatchPlan(8, 2), prefetch=2))
    for _ in range(30):
        step = next(steps)
        assert len(step) == 4
        del step  # who keeps it while the next one is asked for has two
    steps.close()
    assert most <= 4 * (2 + 2)
    del steps
    wait_until(lambda: gc.collect() >= 0 and not alive)


@pytest.mark.parametrize("reads", [1, 4])  # of a step
@pytest.mark.parametrize(("options", "arrays"), [({}, 1), ({"eod_mask_loss": True, "eod": 0}, 2)])
@pytest.mark.parametrize("prefetch", [1, 2, 8])
def test_memory_of_steps_that_are_gone_is_used_again(tmp_path, prefetch, monkeypatch, options, arrays, reads):
    write_pair(tmp_path / "a", [[50]] * 10)
    dataset = open_by_keys(tmp_path / "a", sequence_length=8, **options)
    monkeypatch.setattr("mdata.loader.loader._TOKENS_TOGETHER", 8 * 8 // reads)
    made: list[tuple[int, ...]] = []
    counted = {"empty": lambda *words: (made.append(words[0]), np.empty(*words))[1]}
    counting = SimpleNamespace(**{**vars(np), **counted})
    monkeypatch.setattr("mdata.loader.loader.np", counting)
    steps = iter(Loader(dataset, BatchPlan(8, 2), prefetch=prefetch))
    for _ in range(50):
        next(steps)
    steps.close()
    assert reads * arrays <= len(made) <= reads * arrays * (prefetch + 2)  # the text, and the mask of rules by value


@pytest.mark.parametrize("prefetch", [1, 2, 8])
def test_a_batch_that_is_kept_never_changes(blend, prefetch):
    steps = iter(Loader(blend, BatchPlan(8, 2), prefetch=prefetch))
    kept = [batch for number in range(30) for batch in next(steps) if number % 3]
    labels = [batch.labels for batch in next(steps)]  # an array outlives its batch
    last = labels[0].copy()
    for _ in range(30):
        next(steps)
    steps.close()
    assert np.array_equal(labels[0], last)
    for batch in kept:
        again = blend.read(batch.samples)
        assert np.array_equal(batch.tokens, again.tokens)
        assert np.array_equal(batch.labels, again.labels)
        assert np.array_equal(batch.loss_mask, again.loss_mask)


def test_a_stalled_disk_is_told_by_component_shard_and_byte_and_rarely(blend, monkeypatch):
    disk = threading.Event()
    read = mdata.Dataset.read
    monkeypatch.setattr(mdata.Dataset, "read", lambda *words, **named: (disk.wait(), read(*words, **named))[1])
    notes = Notes(3, disk)
    steps = iter(Loader(blend, BatchPlan(4, 4), progress=notes, patience_s=0.02))
    (batch,) = next(steps)
    steps.close()
    components, inside = blend.locate(batch.samples)
    assert len(notes.heard) == 4
    assert notes.heard[-1].startswith("the data came after")
    for text in notes.heard[:3]:
        assert text.startswith("waiting for data since ")
        for number in set(components.tolist()):
            component = blend.components[number]
            first, _ = component.samples.token_range(int(inside[components == number][0]))
            assert f" {component.name}: " in text
            assert f"{component.corpus.readers[0].bin_path} at byte {4 * first} (" in text


def test_the_pauses_between_notes_double_up_to_a_limit(monkeypatch):
    """Waits are counted by the timeouts that the thread's iterator is given; no clock runs."""
    pauses: list[float] = []

    def never(timeout_s):
        pauses.append(timeout_s)
        if len(pauses) == 8:
            return ["came"]
        raise queue.Empty

    steps = PrefetchIterator(Reading(iter([]), str), ahead=1)
    monkeypatch.setattr(steps._steps, "take", never)
    assert next(steps) == ["came"]
    assert pauses == [30, 60, 120, 240, 480, 600, 600, 600]


def test_who_need_not_wait_hears_nothing(blend):
    notes = Notes(99, threading.Event())
    steps = iter(Loader(blend, BatchPlan(4, 2), progress=notes))
    for _ in range(5):
        next(steps)
    steps.close()
    assert notes.heard == []


def test_a_closed_iterator_reads_no_further_part_of_its_step():
    begun, disk = threading.Event(), threading.Event()
    parts_read: list[int] = []

    def read(part: int) -> list[int]:
        parts_read.append(part)
        begun.set()
        disk.wait()
        return [part]

    steps = PrefetchIterator(Reading([range(64)], read), ahead=1)
    assert begun.wait(30)
    steps.close()
    disk.set()
    wait_until(lambda: all(t.name != "mdata-prefetch" for t in threading.enumerate()))
    assert parts_read == [0]


@pytest.mark.parametrize("options", [{}, {"kind": "packed"}, {"order": "megatron"}, {"shuffle_block": 4}])
def test_a_pass_neither_reads_nor_changes_global_random_state(tmp_path, options):
    write_pair(tmp_path / "a", [[50]] * 10)

    def samples(seed: int) -> list[bytes]:
        random.seed(seed)
        np.random.seed(seed)
        before = random.getstate(), [str(part) for part in np.random.get_state()]
        dataset = open_by_keys(tmp_path / "a", sequence_length=8, cache=str(tmp_path / "cache"), **options)
        steps = iter(Loader(dataset, BatchPlan(4, 2)))
        found = [batch.rows.text.tobytes() for _ in range(5) for batch in next(steps)]
        steps.close()
        assert (random.getstate(), [str(part) for part in np.random.get_state()]) == before
        return found

    assert samples(1) == samples(2)


def test_nor_that_of_torch(blend):
    torch = pytest.importorskip("torch")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    steps = iter(Loader(blend, BatchPlan(4, 2)))
    next(steps)
    steps.close()
    assert torch.equal(torch.get_rng_state(), before)


PARENT = """
import sys, threading, time
import mdata, mdata.loader.loader
data = mdata.open_dataset(sys.argv[1], sequence_length=8, num_samples=4000)
steps = iter(mdata.Loader(data, mdata.loader.loader.BatchPlan(4, 2), prefetch=2))
next(steps)
if int(sys.argv[2]):
    from torch.utils.data import DataLoader
    batches = iter(DataLoader(data, batch_size=4, num_workers=int(sys.argv[2])))
    # One of each worker: torch's workers know the parent that is there when they begin, and outlive one killed before.
    for _ in range(int(sys.argv[2])):
        next(batches)
print("ready", flush=True)
time.sleep(1000)
"""


def start_parent(prefix: Path, workers: int) -> subprocess.Popen:
    words = [sys.executable, "-W", "ignore", "-c", PARENT, str(prefix), str(workers)]
    parent = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "ready\n"
    return parent


def children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid:
                found.append(int(folder.name))
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_parent_that_is_killed_leaves_no_process(tmp_path, workers):
    if workers:
        pytest.importorskip("torch")
    write_pair(tmp_path / "a", [[50]] * 10)
    parent = start_parent(tmp_path / "a", workers)
    below = children(parent.pid)
    assert len(below) == workers
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    wait_until(lambda: not any(map(is_alive, below)))


def test_ctrl_c_ends_a_process_whose_disk_stands_still_once_the_read_is_over(tmp_path):
    """The main thread waits for data that does not come; what it gets is a KeyboardInterrupt, and the process ends."""
    code = (
        "import sys, time, threading, mdata, mdata.loader.loader\n"
        "mdata.Dataset.read = lambda self, samples, out: (print('reading', flush=True), time.sleep(1))\n"
        "data = mdata.open_dataset(sys.argv[1], sequence_length=8)\n"
        "next(iter(mdata.Loader(data, mdata.loader.loader.BatchPlan(1 << 20, 1))))\n"
    )
    write_pair(tmp_path / "a", [[50]] * 10)
    words = [sys.executable, "-c", code, str(tmp_path / "a")]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "Fatal" not in errors
    assert process.returncode == -signal.SIGINT
    assert out.count("reading") < 4  # not all 32 parts of the step


def read_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


@pytest.mark.parametrize("mode", ["mmap", "pread"])
def test_ranks_of_one_node_that_share_rows_read_them_from_the_disk_once(tmp_path, mode):
    """Ranks along the tensor axis are loaders of their own over the same rows; the page cache is the node's."""
    write_pair(tmp_path / "a", [[50_000]] * 40)
    size = (tmp_path / "a.bin").stat().st_size
    with (tmp_path / "a.bin").open("rb+") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    reads = []
    for _ in range(2):
        dataset = mdata.open_dataset(tmp_path / "a", sequence_length=1000, mode=mode)
        before = read_from_disk()
        steps = iter(Loader(dataset, BatchPlan(100, 50)))
        for _ in range(20):
            next(steps)
        steps.close()
        reads.append(read_from_disk() - before)
    if reads[0] < size / 2:
        pytest.skip("this file system does not count what it reads, or would not forget")
    assert reads[1] < size / 10


KEEPS = {
    "the array": lambda array: array,
    "a view": lambda array: array[:, 1:],
    "a view of a view": lambda array: array.T[1:][0],
    "a memoryview": lambda array: memoryview(array),
    "another type": lambda array: array.view(np.uint8),
    "a field of a record": lambda array: array.view([("low", np.int32), ("high", np.int32)])["high"],
}


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


@examples(100)
@given(st.lists(st.tuples(st.sampled_from(list(KEEPS)), st.integers(0, 3)), max_size=40), st.integers(1, 3))
def test_what_is_kept_never_changes(steps, waiting):
    """Each array is filled with its number; of those kept one is dropped now and then."""
    buffers, kept = BufferPool(waiting), []
    for number, (how, dropped) in enumerate(steps):
        array = buffers.empty((2, 3), np.int64)
        assert array.flags.writeable and array.shape == (2, 3) and array.dtype == np.int64
        array[:] = number
        kept.append((KEEPS[how](array), np.array(KEEPS[how](array))))
        del array
        del kept[:dropped]
        assert all(np.array_equal(view, copy) for view, copy in kept)


def test_a_tensor_keeps_its_memory():
    torch = pytest.importorskip("torch")
    buffers = BufferPool(2)
    tensor = torch.from_numpy(buffers.empty((2, 3), np.int64))[:, 1:]
    tensor[:] = 5
    for _ in range(3):
        buffers.empty((2, 3), np.int64)[:] = 6
    assert (tensor == 5).all()
    known = tensor.data_ptr() - 8
    del tensor
    assert address(buffers.empty((2, 3), np.int64)) == known


def test_shapes_and_types_do_not_share_memory():
    buffers = BufferPool(4)
    addresses = [address(buffers.empty((2, 3), np.int64)) for _ in range(3)]
    assert len(set(addresses)) == 1
    for shape, dtype in (((3, 2), np.int64), ((2, 3), np.float64)):
        assert address(buffers.empty(shape, dtype)) != addresses[0]


@pytest.mark.parametrize("waiting", [1, 3])
def test_no_more_waits_than_is_asked_for(waiting):
    size = 100_000
    buffers = BufferPool(waiting)
    gc.collect()
    tracemalloc.start()
    try:
        kept = [buffers.empty((1, size), np.uint8) for _ in range(10)]
        assert tracemalloc.get_traced_memory()[0] > 10 * size
        del kept
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert waiting * size <= held < (waiting + 1) * size


def test_memory_may_come_back_in_another_thread():
    buffers, wrong = BufferPool(4), []

    def work(number: int) -> None:
        for _ in range(300):
            arrays = [buffers.empty((1, 64), np.int64) for _ in range(3)]
            for array in arrays:
                array[:] = number
            if not all((array == number).all() for array in arrays):
                wrong.append(number)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))  # raises what one of them raised
    assert not wrong


def make(folder, **options) -> mdata.Dataset:
    names = ["a", "b", "c", "d", "e", "f"]
    for number, name in enumerate(names):
        write_pair(folder / name, [[50 + number]] * 6)  # the same pair twice would be refused
    words = [str(folder / name) for name in names]
    mdata.make_blend([word for path in words for word in ("1", path)], folder / "mix.json")
    return open_by_keys(folder / "mix.json", sequence_length=8, cache=str(folder / "cache"), **options)


def test_the_byte_is_that_of_the_first_token_of_the_sample(tmp_path):
    dataset = make(tmp_path)
    for sample in range(30):
        text = describe_places(dataset, np.array([sample]))
        path, byte = text.split(": ")[1].removesuffix(" (1 sample)").split(" at byte ")
        with Path(path).open("rb") as file:
            file.seek(int(byte))
            assert np.frombuffer(file.read(32), "<i4").tolist() == dataset[sample]["tokens"].tolist()


def test_a_shard_further_on_is_found(tmp_path):
    dataset = make(tmp_path)
    corpus = dataset.components[0].corpus
    corpus.readers, corpus._token_ends = corpus.readers * 2, np.array([300, 600])
    corpus.num_tokens = 600
    assert corpus.file_position(299) == (tmp_path / "a.bin", 1196)
    assert corpus.file_position(300) == (tmp_path / "a.bin", 0)
    assert corpus.file_position(599) == (tmp_path / "a.bin", 1196)


def test_many_components_are_cut_short(tmp_path):
    text = describe_places(make(tmp_path), np.arange(60))
    assert text.count(" at byte ") == 4
    assert text.endswith("(10 samples); 2 more components")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "packed"}, "a: its sample 0 (1 sample)"),
        ({"order": "megatron", "num_samples": 40}, "samples 0"),
    ],
)
def test_of_other_orders_numbers_are_told(tmp_path, options, expected):
    dataset = make(tmp_path, **options)
    text = describe_places(dataset, np.array([0]))
    assert text.split(": ", 1)[-1] == expected.split(": ", 1)[-1]


def test_nothing_is_read_for_it(tmp_path):
    """Where the disk is what is waited for, a word about it must not wait too: the files are gone."""
    write_pair(tmp_path / "a", [[50]] * 6)
    dataset = mdata.open_dataset(tmp_path / "a", sequence_length=8, mode="pread")
    for end in (".bin", ".idx"):
        (tmp_path / f"a{end}").unlink()
    dataset.components[0].corpus.readers[0].file = None
    assert "a.bin at byte " in describe_places(dataset, np.arange(4))
