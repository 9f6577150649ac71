"""Reading ahead: bounded memory, a word about a stalled disk, no global random state, nothing left behind."""

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
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mdata
from mdata import Loader
from mdata.loader.loader import BatchPlan
from mdata.loader.prefetch import PrefetchIterator, Reading
from mdata.progress import Silent
from tests.helpers.corpora import write_pair
from tests.helpers.open_by_keys import open_by_keys


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
    return mdata.open(tmp_path / "mix.json", sequence_length=8)


def until(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


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
        until(lambda taken=taken: number_read == parts * min(40, taken + ahead + 1))
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
    until(lambda: gc.collect() >= 0 and not alive)


@pytest.mark.parametrize("reads", [1, 4])  # of a step
@pytest.mark.parametrize(("options", "arrays"), [({}, 1), ({"eod_mask_loss": True, "eod": 0}, 2)])
@pytest.mark.parametrize("prefetch", [1, 2, 8])
def test_memory_of_steps_that_are_gone_is_used_again(tmp_path, prefetch, monkeypatch, options, arrays, reads):
    write_pair(tmp_path / "a", [[50]] * 10)
    dataset = open_by_keys(tmp_path / "a", sequence_length=8, **options)
    monkeypatch.setattr("mdata.loader.loader._TOKENS_TOGETHER", 8 * 8 // reads)
    made: list[tuple[int, ...]] = []
    counting = SimpleNamespace(empty=lambda *words: (made.append(words[0]), np.empty(*words))[1], asarray=np.asarray)
    monkeypatch.setattr("mdata.loader.buffer_pool.np", counting)
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
    until(lambda: all(t.name != "mdata-prefetch" for t in threading.enumerate()))
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
data = mdata.open(sys.argv[1], sequence_length=8, num_samples=4000)
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


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


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
    until(lambda: all(map(gone, below)))


def test_ctrl_c_ends_a_process_whose_disk_stands_still_once_the_read_is_over(tmp_path):
    """The main thread waits for data that does not come; what it gets is a KeyboardInterrupt, and the process ends."""
    code = (
        "import sys, time, threading, mdata, mdata.loader.loader\n"
        "mdata.Dataset.read = lambda self, samples, out: (print('reading', flush=True), time.sleep(1))\n"
        "data = mdata.open(sys.argv[1], sequence_length=8)\n"
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
        dataset = mdata.open(tmp_path / "a", sequence_length=1000, mode=mode)
        before = read_from_disk()
        steps = iter(Loader(dataset, BatchPlan(100, 50)))
        for _ in range(20):
            next(steps)
        steps.close()
        reads.append(read_from_disk() - before)
    if reads[0] < size / 2:
        pytest.skip("this file system does not count what it reads, or would not forget")
    assert reads[1] < size / 10
