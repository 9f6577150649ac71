"""Which rows a step reads and which rank gets them: pure arithmetic on the counter of consumed samples.

A global batch is samples [consumed, consumed + size) in an order of its own, keyed by (seed, first sample),
so that no component of a blend sticks to one rank; then rows are dealt in runs of a microbatch. Nothing
depends on the number of ranks but who gets what.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mdata.errors import UsageError
from mdata.keys import derive_key
from mdata.order.permutation import Permutation


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
    rows = Permutation(size, derive_key("batch rows v1", seed, first_sample))
    return first_sample + rows.forward(np.arange(size))


def rank_rows(batch: NDArray[np.int64], *, dp_rank: int, dp_size: int, micro_batch: int) -> NDArray[np.int64]:
    """Return one rank's rows of a global batch, int64[num_microbatches, micro_batch].

    Microbatch m of rank r is rows [(m dp_size + r) micro_batch, + micro_batch) of the batch.

    Args:
        batch: int64[n], from `global_batch`.
        dp_rank: 0 to dp_size - 1.
        dp_size: data-parallel ranks.
        micro_batch: rows of one forward pass.

    Raises:
        UsageError: the batch cannot be dealt evenly, or a number is out of range.
    """
    if micro_batch < 1 or dp_size < 1 or not 0 <= dp_rank < dp_size:
        raise UsageError(
            "rows cannot be dealt",
            found=f"dp rank {dp_rank} of {dp_size}, microbatch {micro_batch}",
            expected="a rank below the number of ranks, and at least one row",
        )
    if not len(batch) or len(batch) % (dp_size * micro_batch):
        raise UsageError(
            f"the global batch {len(batch)} is no multiple of microbatch {micro_batch} x {dp_size} ranks",
            expected=f"a multiple of {micro_batch * dp_size}",
            fix="another global batch, microbatch, or number of data-parallel ranks",
        )
    return batch.reshape(-1, dp_size, micro_batch)[:, dp_rank]
