"""Which rows a step reads and which rank gets them: pure arithmetic on the counter of consumed samples.

A global batch is samples [consumed, consumed + size), permuted with a key of (seed, first sample) so that no component
of a blend sticks to one rank; ranks then take rows in runs of a microbatch. The number of ranks decides only which rank
reads which rows. `Sampler` is this stream for one rank; its state is the counter, and the data id and seed by which
another stream is refused (mdata/loader/resume_check.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mdata.errors import UsageError, counted
from mdata.loader.batch_sizes import BatchSizes
from mdata.loader.resume_check import Continued, goes_on
from mdata.order.permutation import shuffled_range
from mdata.util.random_keys import KeyStem


def global_batch(first_sample: int, size: int, *, seed: int) -> NDArray[np.int64]:
    """Return the global sample numbers of one batch, int64[size]: a permutation of [first_sample, +size).

    Args:
        first_sample: consumed samples before the batch.
        size: rows of the batch.
        seed: the run's seed.

    Raises:
        UsageError: a size below 1 or a negative first sample.
    """
    if size < 1 or first_sample < 0:
        raise UsageError(
            "a global batch has at least one row and starts at sample 0 or later",
            found=f"size {size}, first sample {first_sample}",
        )
    return shuffled_range(first_sample, size, key=_keys(seed).key(first_sample))


@lru_cache(maxsize=4)
def _keys(seed: int) -> KeyStem:
    return KeyStem("batch rows v1", seed)


def rank_rows(batch: NDArray[np.int64], *, dp_rank: int, dp_size: int, micro_batch: int) -> NDArray[np.int64]:
    """Return one rank's rows of a global batch, int64[num_microbatches, micro_batch].

    Microbatch m of rank r is rows [(m dp_size + r) micro_batch, + micro_batch) of the batch.

    Args:
        batch: int64[n], from `global_batch`.
        dp_rank: 0 to dp_size - 1.
        dp_size: data-parallel ranks.
        micro_batch: rows of one forward pass.

    Raises:
        UsageError: the batch cannot be divided evenly, or a number is out of range.
    """
    if micro_batch < 1 or dp_size < 1 or not 0 <= dp_rank < dp_size:
        raise UsageError(
            "the batch cannot be divided among ranks",
            found=f"dp rank {dp_rank} of {dp_size}, microbatch {micro_batch}",
            expected="a rank below the number of ranks, and at least one row",
        )
    if not len(batch) or len(batch) % (dp_size * micro_batch):
        raise UsageError(
            f"the global batch {len(batch)} is not a multiple of microbatch {micro_batch} x {counted(dp_size, 'rank')}",
            expected=f"a multiple of {micro_batch * dp_size}",
            fix="another global batch, microbatch, or number of data-parallel ranks",
        )
    return batch.reshape(-1, dp_size, micro_batch)[:, dp_rank]


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """One rank's sample numbers, step after step, from a counter of consumed samples on.

    Args:
        data_id: of the dataset; its state refuses another.
        sizes: samples of each step, over all ranks.
        micro_batch: rows of one forward pass.
        dp_rank, dp_size: this rank, and how many there are; may be others after a resume.
        seed: keys the order of rows inside a global batch.
        consumed: samples read before, by all ranks together.
        num_samples: of the dataset; the last whole step is the last. None: without end.
        in_order: rows of a batch stay in the order of their numbers, as in Megatron.
        continues: data ids that this one continues (a changed blend), and the samples after which they differ.
    """

    data_id: str
    sizes: BatchSizes
    micro_batch: int
    dp_rank: int = 0
    dp_size: int = 1
    seed: int = 1234
    consumed: int = 0
    num_samples: int | None = None
    in_order: bool = False
    continues: Sequence[Continued] = ()

    def check(self) -> None:
        """Refuse sizes that these ranks cannot divide evenly, those of later steps too.

        Raises:
            UsageError: names the size.
        """
        if self.consumed < 0:
            raise UsageError(counted(self.consumed, "consumed sample"), expected="0 or more")
        for size in self.sizes.sizes:
            self._rows(0, size)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """int64[microbatches, rows] of each step from `consumed` on."""
        for first, size in self.sizes.steps(self.consumed):
            if self.num_samples is not None and first + size > self.num_samples:
                return
            yield self._rows(first, size)

    def state(self, num_steps: int = 0) -> dict[str, int | str]:
        """The position after this many steps, for `restored`."""
        consumed = self.sizes.after(num_steps, consumed=self.consumed)
        return {"consumed_samples": consumed, "data_id": self.data_id, "seed": self.seed}

    def restored(self, state: Mapping[str, object]) -> Sampler:
        """This sampler at the position of a state, which may come from a blend that this one continues.

        Raises:
            UsageError: a field is missing or belongs to another stream; or the blend changes samples already read.
        """
        consumed = state.get("consumed_samples")
        if not isinstance(consumed, int) or isinstance(consumed, bool) or consumed < 0:
            raise UsageError("the sampler's state has no valid consumed_samples", found=f"{consumed!r}")
        same_data = goes_on(state.get("data_id"), self.data_id, continues=self.continues, consumed=consumed)
        for field, ours, same in (
            ("data_id", self.data_id, same_data),
            ("seed", self.seed, state.get("seed") == self.seed),
        ):
            if not same:
                raise UsageError(
                    f"the sampler's state is for a different {field}",
                    found=f"{state.get(field)!r}",
                    expected=f"{ours!r}",
                    fix="open the data that the state was made with, or start over",
                )
        return replace(self, consumed=consumed)

    def _rows(self, first: int, size: int) -> NDArray[np.int64]:
        batch = np.arange(first, first + size) if self.in_order else global_batch(first, size, seed=self.seed)
        return rank_rows(batch, dp_rank=self.dp_rank, dp_size=self.dp_size, micro_batch=self.micro_batch)
