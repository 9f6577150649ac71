"""Batches, read ahead by a thread; a rank's batches are a function of (data, consumed samples, batch sizes, rank).

The thread only fetches what arithmetic has already decided (mdata/loader/sampler.py), so reading ahead cannot change
the stream, and resuming means starting at another sample. No global random state is used. Ranks that read the same rows
each gather them; a node reads the file from disk once (docs/design/loader.md).

Reading ahead: a step is a list of parts; the thread (mdata/util/background.py) reads the parts of the next steps while
the consumer works on this one. At most `prefetch` + 2 steps are in memory: those that wait, the one being read, and the
consumer's. An error in the thread is raised in place of the step. The thread checks between parts whether to stop, and
dies with the process. When a consumer waits long, a note says where its samples are, without reading anything, because
the disk may be the cause: a byte offset is given only if it can be computed.

Memory: a buffer is reused once the last array over it is gone. Every view, torch tensor or memoryview keeps its base
array alive, so a batch that is kept never changes, and nothing has to be returned.
"""

from __future__ import annotations

import queue
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.typing import DTypeLike, NDArray

from mdata.dataset.component import Component
from mdata.dataset.dataset import Dataset
from mdata.dataset.dataset_options import MegatronOrder
from mdata.errors import UsageError, counted
from mdata.loader.batch_sizes import BatchSizes, constant
from mdata.loader.resume_check import continued
from mdata.loader.sampler import Sampler
from mdata.mixing.megatron_blend import MegatronBlend
from mdata.progress import SILENT, Progress
from mdata.samples.gpt import GptSamples
from mdata.samples.rows import Empty, Rows
from mdata.samples.sample_options import FieldKind
from mdata.util.background import BackgroundIterator, ClosedError

PATIENCE_S = 30.0
# Of 2 MiB of text what a read costs beside its tokens is hardly seen (docs/design/loader.md).
_TOKENS_TOGETHER = 1 << 18


@dataclass(frozen=True)
class BatchPlan:
    """Sizes of a step and this rank's place in it.

    Args:
        global_batch: rows of one step, over all ranks.
        micro_batch: rows of one forward pass.
        dp_rank, dp_size: this rank of the data-parallel axis.
        seed: keys the order of rows inside a global batch.
        sizes: growing batch sizes (mdata/loader/batch_sizes.py); None: every step has `global_batch`.
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
        sampler = Sampler(
            data_id=dataset.data_id,
            sizes=self.sizes or constant(self.global_batch),
            micro_batch=self.micro_batch,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            seed=self.seed,
            consumed=consumed,
            num_samples=dataset.num_samples,
            in_order=isinstance(dataset.options.order, MegatronOrder),
            continues=tuple(continued(dataset)),
        )
        sampler.check()
        return sampler


@dataclass(eq=False, slots=True, weakref_slot=True)  # not frozen, as Rows
class Batch:
    """Rows of a forward pass.

    Attributes:
        samples: int64[b], their numbers.
        rows: their fields (see `Rows`). tokens and labels, int64[b, S], are views of `rows.text`; loss_mask is
            float32[b, S]. Of bert and t5 the fields are those of `BertSamples` and `T5Samples`, see `FieldRows`.
    """

    samples: npt.NDArray[np.int64]
    rows: Rows

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """The inputs."""
        return self.rows.tokens

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The token after each input."""
        return self.rows.labels

    @property
    def loss_mask(self) -> npt.NDArray[np.float32]:
        """float32[b, S], 1 where a label counts; computed on first use, so check `rows.unmasked` before."""
        return self.rows.loss_mask


def collate(dataset: Dataset, samples: npt.ArrayLike, *, empty: Empty = np.empty) -> Batch:
    """The rows of some samples, integer[b], in their order; `empty` makes their arrays.

    Raises:
        IndexError: a sample the dataset does not have.
        UsageError: a sample that does not fit (T5 in Megatron's order).
    """
    numbers = np.ascontiguousarray(samples, np.int64)
    return Batch(numbers, dataset.read(numbers, out=dataset.empty_rows(len(numbers), empty=empty)))


def collate_step(dataset: Dataset, samples: npt.NDArray[np.int64], *, empty: Empty = np.empty) -> Iterator[Batch]:
    """The microbatches of a step, int64[m, b], like `collate` of each, with fewer reads: some share their memory.

    Raises:
        IndexError, UsageError: as `collate`.
    """
    for part in parts_of(samples, dataset.options.sequence_length):
        yield from _read_together(dataset, part, empty=empty)


def parts_of(step: npt.NDArray[np.int64], sequence_length: int) -> list[npt.NDArray[np.int64]]:
    """The microbatches of a step, int64[m, b], in groups large enough for one read: int64[g, b] each."""
    together = _microbatches_together(step.shape[1], sequence_length)
    return [step[first : first + together] for first in range(0, len(step), together)]


def _microbatches_together(micro_batch: int, sequence_length: int) -> int:
    return max(1, _TOKENS_TOGETHER // (micro_batch * sequence_length))


def _read_together(dataset: Dataset, samples: npt.NDArray[np.int64], *, empty: Empty) -> list[Batch]:
    """Microbatches int64[g, b] by one read."""
    batch = collate(dataset, samples.reshape(-1), empty=empty)
    return list(map(Batch, batch.samples.reshape(samples.shape), batch.rows.split(len(samples))))


class Loader:
    """This rank's microbatches of every step from `consumed` on.

    Iterating starts a thread; several iterators are independent. A finite dataset ends with its last whole step (as
    torch's DataLoader with `drop_last`), because a partial step cannot be divided evenly among ranks. State follows
    torchdata's StatefulDataLoader.

    Args:
        dataset: what is read.
        batches: sizes and rank.
        consumed: samples read before, by all ranks together.
        prefetch: steps read ahead; two more are in memory: the one being read and the consumer's. Buffers of released
            batches are reused, up to that many steps.
        progress: receives a note on the samples waited for when a step takes longer than `patience_s` seconds.

    Raises:
        UsageError: sizes that do not fit each other.
    """

    def __init__(
        self,
        dataset: Dataset,
        batches: BatchPlan,
        *,
        consumed: int = 0,
        prefetch: int = 2,
        progress: Progress = SILENT,
        patience_s: float = PATIENCE_S,
    ) -> None:
        if consumed < 0 or prefetch < 1:
            raise UsageError(
                "a loader starts at sample 0 or later and reads at least one step ahead",
                found=f"consumed {consumed}, prefetch {prefetch}",
            )
        self._dataset, self._prefetch = dataset, prefetch
        self._progress, self._patience_s = progress, patience_s
        self._sampler = batches.sampler(dataset, consumed)  # sizes that do not fit are refused here, not in the thread
        self._next, self._returned = self._sampler, StepCount()
        self._latest = self._sampler

    def __repr__(self) -> str:
        sampler = self._sampler
        first, last = sampler.sizes.sizes[0], sampler.sizes.sizes[-1]
        sizes = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        rank = f"rank {sampler.dp_rank} of {sampler.dp_size}, from sample {self._next.consumed:,}"
        return f"<mdata.Loader global batch {sizes}, microbatch {sampler.micro_batch}, {rank}, {self._dataset!r}>"

    def state_dict(self) -> dict[str, int | str]:
        """The position after the last step that the newest iterator returned: JSON, equal on all ranks.

        Steps read ahead are not counted. A loader with another dp_size or micro_batch may load it.
        """
        return self._latest.state(self._returned.steps)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Start the next iterator at a state; later ones start at `consumed` again, as in torchdata.

        Raises:
            UsageError: as `Sampler.restored`.
        """
        self._next = self._latest = self._sampler.restored(state)
        self._returned = StepCount()

    def __iter__(self) -> Iterator[list[Batch]]:
        sampler, length = self._next, self._dataset.options.sequence_length
        self._latest, self._next, self._returned = sampler, self._sampler, StepCount()
        # As many as are alive where the consumer keeps none: then no memory is made after the first steps.
        most = max(sampler.sizes.sizes) // (sampler.dp_size * sampler.micro_batch)
        reads = -(-most // _microbatches_together(sampler.micro_batch, length))
        # Samples of bert, t5 and classify have several arrays.
        several = isinstance(self._dataset.options.kind, FieldKind)
        arrays = len(self._dataset.empty_rows(0).fields) if several else 1
        buffers = BufferPool((self._prefetch + 2) * reads * arrays)
        read = partial(_read_together, self._dataset, empty=buffers.empty)
        steps: Iterable[list[npt.NDArray[np.int64]]] = (parts_of(step, length) for step in sampler)
        if any(part.corpus.address for part in self._dataset.components):
            from mdata.loader.look_ahead import looked_ahead

            steps = looked_ahead(steps, self._dataset)
        reading = Reading(steps, read, lambda part: describe_places(self._dataset, part.reshape(-1)))
        return PrefetchIterator(
            reading,
            ahead=self._prefetch,
            patience_s=self._patience_s,
            progress=self._progress,
            count=self._returned,
        )


T = TypeVar("T")
R = TypeVar("R")

# The first note about a stalled disk comes after the patience, the next after twice as long, up to this.
_LONGEST_PAUSE_S = 600.0


@dataclass
class Reading(Generic[T, R]):
    """The work of the thread: what it reads ahead.

    Args:
        steps: the parts of each step.
        read: reads one part; returns what it adds to the step.
        describe: says in words where a part lies, without touching the disk.

    Attributes:
        part: the last one that was begun.
    """

    steps: Iterable[Iterable[T]]
    read: Callable[[T], list[R]]
    describe: Callable[[T], str] = str
    part: T | None = None


@dataclass
class StepCount:
    """The number of steps that an iterator has returned, without a reference to the iterator."""

    steps: int = 0


class PrefetchIterator(Iterator[list[R]], Generic[T, R]):
    """An iterator over steps that a thread reads ahead.

    Args:
        reading: the work of the thread.
        ahead: steps that may wait.
        patience_s: seconds after which a note says which samples the consumer waits for.
        progress: receives the notes.
        count: counts the steps.
    """

    def __init__(
        self,
        reading: Reading[T, R],
        *,
        ahead: int,
        patience_s: float = 30.0,
        progress: Progress = SILENT,
        count: StepCount | None = None,
    ) -> None:
        self._returned = StepCount() if count is None else count
        self._reading, self._patience_s, self._progress = reading, patience_s, progress
        self._steps = BackgroundIterator(partial(_read_steps, reading), limit=ahead, name="mdata-prefetch")

    def __next__(self) -> list[R]:
        began, pause = time.monotonic(), self._patience_s
        while True:
            try:
                step = self._steps.take(pause)
            except queue.Empty:
                part = self._reading.part
                where = "nothing is being read yet" if part is None else self._reading.describe(part)
                self._progress.note(f"waiting for data since {time.monotonic() - began:.0f} s: {where}")
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                continue
            if pause > self._patience_s:
                self._progress.note(f"the data came after {time.monotonic() - began:.0f} s")
            self._returned.steps += 1
            return step

    def close(self) -> None:
        """End the thread at its next part, without waiting; steps read ahead are dropped."""
        self._steps.stop()


def _read_steps(reading: Reading[T, R], is_closed: Callable[[], bool]) -> Iterator[list[R]]:
    for parts in reading.steps:
        step: list[R] = []
        for part in parts:
            if is_closed():
                raise ClosedError
            reading.part = part
            step += reading.read(part)
        yield step


_Memory = tuple[NDArray[Any], dict[str, Any]]
"""An array that owns memory, and its array interface."""


class BufferPool:
    """Arrays of a few shapes over reused memory; thread-safe.

    Args:
        waiting: free buffers to keep for each shape; more are released to the system.
    """

    def __init__(self, waiting: int) -> None:
        # A full deque drops its oldest entry; append and pop are atomic, so any thread may return memory.
        self._waiting: defaultdict[Any, deque[_Memory]] = defaultdict(partial(deque, maxlen=waiting))

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An uninitialized array that no other array shares."""
        waiting = self._waiting[shape, dtype]
        try:
            memory, interface = waiting.pop()  # what came last may still lie in a cache
        except IndexError:
            memory = np.empty(shape, dtype)
            interface = memory.__array_interface__
        return np.asarray(_Lent(memory, interface, waiting))


class _Lent:
    """The buffer under an array in use; it is freed with the last array over it."""

    __slots__ = ("__array_interface__", "_memory", "_waiting")

    def __init__(self, memory: NDArray[Any], interface: dict[str, Any], waiting: deque[_Memory]) -> None:
        self.__array_interface__ = interface
        self._memory, self._waiting = memory, waiting

    def __del__(self) -> None:
        self._waiting.append((self._memory, self.__array_interface__))


_MOST_COMPONENTS = 4


def describe_places(dataset: Dataset, samples: npt.NDArray[np.int64]) -> str:
    """The first sample of each component among these: "web: web_text_document.bin at byte 8192 (3 samples); ..."."""
    if not dataset.components or isinstance(dataset.selection, MegatronBlend):
        return f"samples {', '.join(map(str, samples[:8].tolist()))}{', ...' * (len(samples) > 8)}"
    components, inside = dataset.locate(samples)
    places = []
    for number in np.unique(components).tolist():
        mine = inside[components == number]
        count = f"({counted(len(mine), 'sample')})"
        places.append(f"{_describe(dataset.components[number], int(mine[0]))} {count}")
    others = len(places) - _MOST_COMPONENTS
    return "; ".join([*places[:_MOST_COMPONENTS], *([counted(others, "more component")] if others > 0 else [])])


def _describe(component: Component, sample: int) -> str:
    if not isinstance(component.samples, GptSamples):
        return f"{component.name}: its sample {sample}"
    token, _ = component.samples.token_range(sample)
    path, byte = component.corpus.file_position(token)
    return f"{component.name}: {path} at byte {byte}"
