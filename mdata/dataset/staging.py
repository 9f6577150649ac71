"""Which blocks of corpora in object storage some samples read, and fetching them in advance.

The samples are read by the usual code, but the corpora only record which blocks are needed and copy nothing, so this
works for every kind of sample and order. `stage` does it for the steps of a node; a `Loader` does it for its next steps
(mdata/loader/look_ahead.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from mdata.block_cache.block_table import PRESENT
from mdata.corpus.stored_corpus import StoredCorpus
from mdata.dataset.dataset import Dataset
from mdata.errors import ResourceError, UsageError, counted
from mdata.indexed.pair_format import BLOCK_BYTES
from mdata.progress import SILENT, Progress
from mdata.samples.sample_options import FieldKind
from mdata.util.arrays import Int64s

if TYPE_CHECKING:
    from mdata.samples.classify import ClassifySamples
    from mdata.samples.masked import MaskedSamples

_READ_AT_ONCE = 256  # samples, whose rows take memory though they are not read
_FETCHED_AT_ONCE = 64


class BlocksRead(NamedTuple):
    """A corpus in storage, and the blocks of it that are read: int64[n], ascending."""

    corpus: StoredCorpus
    blocks: Int64s


@dataclass(frozen=True)
class StageResult:
    """What `stage` did: samples; the blocks that they read; the bytes of these, and the bytes fetched by this call."""

    samples: int
    blocks: int
    num_bytes: int
    fetched_bytes: int


def blocks_read(dataset: Dataset, samples: Int64s) -> list[BlocksRead]:
    """The blocks that these samples read, for each corpus in storage that they use; no token is read.

    Raises:
        IndexError: the dataset does not have such a sample.
    """
    used = np.unique(dataset.locate(samples)[0]).tolist() if len(samples) else []
    stored = [corpus for number in used if isinstance(corpus := dataset.components[number].corpus, StoredCorpus)]
    blocks_of = [(corpus, list[Int64s]()) for corpus in stored]
    for first in range(0, len(samples), _READ_AT_ONCE):
        with ExitStack() as noting:
            noted = [noting.enter_context(corpus.gatherer.noted()) for corpus in stored]
            _read_text(dataset, samples[first : first + _READ_AT_ONCE])
        for (_, blocks), more in zip(blocks_of, noted, strict=True):
            blocks += more
    return [BlocksRead(corpus, np.unique(np.concatenate(blocks))) for corpus, blocks in blocks_of if blocks]


def _read_text(dataset: Dataset, samples: Int64s) -> None:
    """Read samples, without masking: what bert and t5 mask depends on tokens, which nobody has read yet."""
    if not isinstance(dataset.options.kind, FieldKind):
        dataset.read(samples)
        return
    components, inside = dataset.locate(samples)
    for number in np.unique(components).tolist():
        masked = cast("MaskedSamples | ClassifySamples", dataset.components[number].samples)
        masked.texts(inside[components == number])


def stage(dataset: Dataset, batches: Iterable[Int64s], *, progress: Progress = SILENT) -> StageResult:
    """Fetch every block that some samples read, and check those that are already in the cache.

    Args:
        dataset: opened with a cache.
        batches: sample numbers, int64[n] each.
        progress: receives bytes.

    Raises:
        UsageError: no corpus is in storage, or the blocks do not fit in the cache.
        ResourceError: other processes used up the room meanwhile. DamageError, ResourceError: as when reading.
    """
    wanted: dict[str, tuple[StoredCorpus, np.ndarray]] = {}
    for part in dataset.components:
        if isinstance(part.corpus, StoredCorpus):
            wanted[part.corpus.id] = part.corpus, np.zeros(part.corpus.blocks.layout.num_blocks, np.bool_)
    if not wanted:
        raise UsageError("none of these corpora is in object storage", fix="data on a disk needs no staging")
    samples = 0
    for batch in batches:
        samples += len(batch)
        for corpus, blocks in blocks_read(dataset, batch):
            wanted[corpus.id][1][blocks] = True
    needed = [BlocksRead(corpus, np.flatnonzero(mask)) for corpus, mask in wanted.values()]
    num_blocks = sum(len(corpus_blocks.blocks) for corpus_blocks in needed)
    num_bytes = sum(corpus_blocks.corpus.blocks.layout.num_bytes(corpus_blocks.blocks) for corpus_blocks in needed)
    _check_room(needed, num_blocks)
    progress.begin("staging", num_bytes, unit="B")
    try:
        fetched = 0
        for corpus, blocks in _in_parts(needed):
            fetched += corpus.blocks.bring(blocks)
            progress.advance(corpus.blocks.layout.num_bytes(blocks))
    finally:
        progress.end()
    _check_present(needed, num_blocks)
    return StageResult(samples, num_blocks, num_bytes, fetched)


def _in_parts(needed: Iterable[BlocksRead]) -> Iterator[BlocksRead]:
    for corpus, blocks in needed:
        for first in range(0, len(blocks), _FETCHED_AT_ONCE):
            yield BlocksRead(corpus, blocks[first : first + _FETCHED_AT_ONCE])


def _check_room(needed: Sequence[BlocksRead], num_blocks: int) -> None:
    room = min((corpus.blocks.capacity() for corpus, _ in needed), default=num_blocks)
    if num_blocks > room:
        raise UsageError(
            "the cache is too small for all blocks that these samples read",
            found=f"room for {counted(room, 'block')} of 4 MiB, by the disk and cache_size",
            expected=f"room for {counted(num_blocks, 'block')}, {num_blocks * BLOCK_BYTES >> 20:,} MiB",
            fix="fetch fewer steps or samples at a time, or use a larger cache",
        )


def _check_present(fetched: Sequence[BlocksRead], num_blocks: int) -> None:
    evicted = sum(
        int(np.count_nonzero(corpus_blocks.corpus.blocks.table.states()[corpus_blocks.blocks] != PRESENT))
        for corpus_blocks in fetched
    )
    if evicted:
        raise ResourceError(
            "blocks were evicted again while others were fetched",
            found=f"{evicted:,} of {num_blocks:,}",
            expected="room for these blocks besides those that other processes read",
            fix="fetch fewer steps or samples at a time, or use a larger cache",
        )
