"""Requests the blocks of a `Loader`'s next steps before they are read, for corpora in object storage.

The samples of a step follow from its number, so a few steps are taken from the sampler early and passed on later, in
the same order. How many depends on the blocks that they read: these have to fit in the cache beside those of other
processes. If a fetch fails, the error is raised when the step is read. Imported only for such corpora, as it imports
object storage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from mdata.dataset.dataset import Dataset
from mdata.dataset.staging import blocks_read
from mdata.util.arrays import Int64s

_MOST_STEPS, _MOST_BLOCKS = 16, 128


def looked_ahead(steps: Iterable[list[Int64s]], dataset: Dataset) -> Iterator[list[Int64s]]:
    """The same steps, each a list of arrays of samples, while the blocks of later ones are being fetched."""
    waiting: deque[tuple[list[Int64s], int]] = deque()
    blocks = 0
    for step in steps:
        asked, most = _ask(dataset, step)
        waiting.append((step, asked))
        blocks += asked
        while len(waiting) > _MOST_STEPS or (waiting and blocks > most):
            ready, count = waiting.popleft()
            blocks -= count
            yield ready
    for ready, _ in waiting:
        yield ready


def _ask(dataset: Dataset, step: list[Int64s]) -> tuple[int, int]:
    """How many blocks the step needs, and how many may be requested at a time."""
    requests = blocks_read(dataset, np.concatenate([part.reshape(-1) for part in step]))
    for corpus, blocks in requests:
        corpus.blocks.ask_for(blocks)
    return sum(len(request.blocks) for request in requests), min(
        [_MOST_BLOCKS, *(request.corpus.blocks.at_once for request in requests)]
    )
