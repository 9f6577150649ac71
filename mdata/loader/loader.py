"""Batches, read ahead by a thread: what a rank gets is a function of (data, consumed samples, batch sizes,
rank).

The thread (mdata/loader/prefetch.py) only fetches what arithmetic has already decided (mdata/loader/sampler.py), so
reading ahead cannot change the stream, and resuming is starting with another number. Nothing is drawn from a global
random state. Ranks that read the same rows each gather them; the file comes from the disk once a node
(docs/design/loader.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from mdata.dataset.dataset import Dataset
from mdata.dataset.dataset_options import MegatronOrder
from mdata.errors import UsageError
from mdata.loader.batch_sizes import BatchSizes, constant
from mdata.loader.buffer_pool import Buffers
from mdata.loader.prefetch import PrefetchIterator, Reading, StepCount
from mdata.loader.resume_check import continued
from mdata.loader.sampler import Sampler
from mdata.loader.stall_message import describe_places
from mdata.progress import SILENT, Progress
from mdata.samples.rows import Empty, Rows, empty_rows
from mdata.samples.sample_options import MaskedKind

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
        sizes: of steps that grow (mdata/loader/batch_sizes.py); None: each is `global_batch`.
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
            in_order=isinstance(dataset.options.order, MegatronOrder),
            continues=continued(dataset),
        )
        found.check()
        return found


@dataclass(eq=False, slots=True, weakref_slot=True)  # not frozen, as Rows
class Batch:
    """Rows of a forward pass.

    Attributes:
        samples: int64[b], their numbers.
        rows: all that the dataset tells of them (see `Rows`). tokens and labels, int64[b, S], are views of `rows.text`;
            loss_mask is float32[b, S].
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
        """1 where a label counts; made when it is first asked for, so look at `rows.unmasked` before."""
        return self.rows.loss_mask


def collate(dataset: Dataset, samples: npt.ArrayLike, *, empty: Empty = np.empty) -> Batch:
    """The rows of some samples, integer[b], in their order; `empty` makes their arrays.

    Raises:
        IndexError: a sample the dataset does not have. UsageError: a kind whose samples are no rows of text.
    """
    if isinstance(dataset.options.kind, MaskedKind):
        raise UsageError(
            f"samples of kind {dataset.options.kind.name!r} are not rows of tokens and labels",
            fix="read them with Dataset.read, or a torch DataLoader",
        )
    numbers = np.ascontiguousarray(samples, np.int64)
    rows = dataset.read(numbers, out=empty_rows(len(numbers), dataset.row_options, empty=empty))
    assert isinstance(rows, Rows), "a kind whose samples are rows"
    return Batch(numbers, rows)


def collate_step(dataset: Dataset, samples: npt.NDArray[np.int64], *, empty: Empty = np.empty) -> Iterator[Batch]:
    """The microbatches of a step, int64[m, b], as `collate` makes each, by fewer reads: some share their memory.

    Raises:
        IndexError, UsageError: as `collate`.
    """
    for part in parts_of(samples, dataset.options.sequence_length):
        yield from _read_together(dataset, part, empty=empty)


def parts_of(step: npt.NDArray[np.int64], sequence_length: int) -> list[npt.NDArray[np.int64]]:
    """The microbatches of a step, int64[m, b], in groups that are worth a read: int64[g, b] each."""
    together = _microbatches_together(step.shape[1], sequence_length)
    return [step[first : first + together] for first in range(0, len(step), together)]


def _microbatches_together(micro_batch: int, sequence_length: int) -> int:
    return max(1, _TOKENS_TOGETHER // (micro_batch * sequence_length))


def _read_together(dataset: Dataset, samples: npt.NDArray[np.int64], *, empty: Empty) -> list[Batch]:
    """Microbatches int64[g, b] by one read."""
    whole = collate(dataset, samples.reshape(-1), empty=empty)
    return list(map(Batch, whole.samples.reshape(samples.shape), whole.rows.split(len(samples))))


class Loader:
    """This rank's microbatches of every step from `consumed` on.

    Iterating starts a thread; several iterators do not disturb each other. A dataset that ends, by itself or by its
    option num_samples, ends with its last whole step (as torch's DataLoader with `drop_last`: a part of one cannot be
    dealt evenly to ranks). State is what torchdata's StatefulDataLoader asks for.

    Args:
        dataset: what is read.
        batches: sizes and rank.
        consumed: samples that all ranks together have read before.
        prefetch: steps read ahead; two more are in memory, one that is being read and the consumer's. Memory of
            batches that nobody holds any more is used again, of so many steps at most.
        progress: receives a note on what is waited for when a step takes longer than `patience_s` seconds, then rarely.

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

    def state_dict(self) -> dict[str, int | str]:
        """What is needed to go on behind the last step that the newest iterator gave: JSON, the same on all ranks.

        Steps that were read ahead are not in it. Another dp_size or micro_batch may go on with it.
        """
        return self._latest.state(self._returned.steps)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Let the next iterator begin at a state; those after it begin at `consumed` again, as torchdata has it.

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
        buffers = Buffers((self._prefetch + 2) * reads)
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
