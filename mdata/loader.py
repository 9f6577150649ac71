"""Batches, read ahead by a thread: what a rank gets is a function of (data, consumed samples, batch sizes,
rank).

The thread only fetches what arithmetic has already decided (mdata/sampler.py), so reading ahead cannot
change the stream, and resuming is starting with another number. An error of the thread is raised where the
batch would have come. The thread ends when the iterator is closed or collected, or when the main thread has ended,
which then waits for it: a thread that Python stops in the middle of our C++ takes the whole process down.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mdata.batch_sizes import BatchSizes, constant
from mdata.dataset import Dataset
from mdata.errors import UsageError
from mdata.sampler import Sampler
from mdata.samples.options import MEGATRON
from mdata.samples.rows import Rows

# How often a thread that waits for room looks whether anybody still listens.
_POLL_S = 0.1


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of a step and this rank's place in it.

    Args:
        global_batch: rows of one step, over all ranks.
        micro_batch: rows of one forward pass.
        dp_rank, dp_size: this rank of the data-parallel axis.
        seed: keys the order of rows inside a global batch.
        sizes: of steps that grow (mdata/batch_sizes.py); None: each is `global_batch`.
    """

    global_batch: int
    micro_batch: int
    dp_rank: int = 0
    dp_size: int = 1
    seed: int = 1234
    sizes: BatchSizes | None = None

    def sampler(self, dataset: Dataset, consumed: int) -> Sampler:
        """This rank's sample numbers from `consumed` on.

        Raises:
            UsageError: sizes that do not fit each other.
        """
        found = Sampler(
            data_id=dataset.data_id,
            sizes=self.sizes or constant(self.global_batch),
            micro_batch=self.micro_batch,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            seed=self.seed,
            consumed=consumed,
            num_samples=dataset.num_samples,
            in_order=dataset.options.order == MEGATRON,
        )
        found.check()
        return found


@dataclass(frozen=True)
class Batch:
    """Rows of a forward pass: samples int64[b], tokens and labels int64[b, S], loss_mask float32[b, S].

    Tokens and labels are views of one array, `rows.text`; `rows` has what else the dataset tells (see `Rows`).
    """

    samples: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]
    rows: Rows


def collate(dataset: Dataset, samples: npt.ArrayLike) -> Batch:
    """The rows of some samples, integer[b], in their order.

    Raises:
        IndexError: a sample the dataset does not have. UsageError: a kind whose samples are no rows of text.
    """
    numbers = np.ascontiguousarray(samples, np.int64)
    rows = dataset.read(numbers)
    if not isinstance(rows, Rows):
        raise UsageError(
            f"samples of kind {dataset.options.kind!r} are no rows of tokens and labels",
            fix="read them with Dataset.read, or a torch DataLoader",
        )
    assert rows.loss_mask is not None, "new rows have a loss mask"
    return Batch(numbers, rows.tokens, rows.labels, rows.loss_mask, rows)


class Loader:
    """This rank's microbatches of every step from `consumed` on.

    Iterating starts a thread; several iterators do not disturb each other. A finite dataset ends with its last whole
    step.

    Args:
        dataset: what is read.
        batches: sizes and rank.
        consumed: samples that all ranks together have read before.
        prefetch: steps read ahead.

    Raises:
        UsageError: sizes that do not fit each other.
    """

    def __init__(self, dataset: Dataset, batches: BatchPlan, *, consumed: int = 0, prefetch: int = 2) -> None:
        if consumed < 0 or prefetch < 1:
            raise UsageError(
                "a loader starts at sample 0 or later and reads at least one step ahead",
                found=f"consumed {consumed}, prefetch {prefetch}",
            )
        self._dataset, self._prefetch = dataset, prefetch
        self._sampler = batches.sampler(dataset, consumed)  # sizes that do not fit are refused here, not in the thread

    def __iter__(self) -> Iterator[list[Batch]]:
        return _Prefetched(self._steps(), self._prefetch)

    def _steps(self) -> Iterator[list[Batch]]:
        for step in self._sampler:
            yield [collate(self._dataset, rows) for rows in step]


class _Prefetched(Iterator[list[Batch]]):
    """An iterator that another thread walks ahead of us."""

    def __init__(self, source: Iterator[list[Batch]], ahead: int) -> None:
        self._queue: queue.Queue[list[Batch] | Exception] = queue.Queue(ahead)
        self._closed = threading.Event()
        # The thread must not hold `self`, or an iterator that is dropped would never be collected.
        work = threading.Thread(
            target=_walk, args=(source, self._queue, self._closed), name="mdata-prefetch", daemon=False
        )
        self._thread = work
        work.start()

    def __iter__(self) -> _Prefetched:
        return self

    def __next__(self) -> list[Batch]:
        if self._closed.is_set():
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, Exception):
            self.close()
            raise item
        return item

    def close(self) -> None:
        """End the thread; what it has read is dropped."""
        self._closed.set()

    def __del__(self) -> None:
        self.close()


def _walk(
    source: Iterator[list[Batch]],
    out: queue.Queue[list[Batch] | Exception],
    closed: threading.Event,
) -> None:
    """Put items, then whatever ended the walk, until nobody listens."""
    ending: Exception = StopIteration()
    try:
        for item in source:
            if not _put(out, item, closed):
                return
    # Whatever it is, it belongs to the consumer: an error that dies with this thread would be a hang there.
    except Exception as error:
        ending = error
    _put(out, ending, closed)


def _put(out: queue.Queue[list[Batch] | Exception], item: list[Batch] | Exception, closed: threading.Event) -> bool:
    """Wait for room; False when the iterator was closed meanwhile, or nobody is left to ask for more."""
    while not closed.is_set() and threading.main_thread().is_alive():
        try:
            out.put(item, timeout=_POLL_S)
        except queue.Full:
            continue
        return True
    return False
