"""`IndexedReader` and `Gatherer` for a corpus whose tokens are in object storage, read through the node's cache.

The map of the blocks shows zeros where a block is not present, so no view of it is handed out: rows are copied by the
same C++ as from files, between two looks at the table of blocks, and single sequences are copies. A read of more blocks
than the cache can spare at once goes block by block. The same code can note which blocks rows need, without reading
anything (`noted`), so that they are fetched ahead. Slow twin: tests/reference/block_cache.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdata._core import Permutation, PooledFile, TokenStore
from mdata.block_cache.corpus_blocks import CorpusBlocks
from mdata.errors import DamageError, MdataError
from mdata.indexed.gather import Blocks, Gatherer, RowArrays, RowFinish
from mdata.indexed.mapped_files import lies_at
from mdata.indexed.pair_format import BLOCK_BYTES
from mdata.indexed.reader import Described, IndexedReader, Mode, PairFacts
from mdata.util.arrays import Int64s


class CachedReader(IndexedReader):
    """One pair whose .idx is on the disk and whose .bin is in storage.

    Args:
        prefix: of the .idx.
        blocks: of all pairs of the corpus.
        shard: the number of this pair.
        mode, described, known_facts: as for `IndexedReader`; there is no .bin at the path in `known_facts`.
    """

    def __init__(
        self,
        prefix: Path,
        blocks: CorpusBlocks,
        *,
        shard: int,
        mode: Mode,
        described: Described,
        known_facts: PairFacts,
    ) -> None:
        super().__init__(prefix, mode=mode, described=described, known_facts=known_facts)
        self._blocks, self._shard = blocks, shard

    def unchanged(self) -> bool:
        """Whether the .idx is still the file that was opened."""
        return lies_at(self.idx_path, self.facts.idx)

    @cached_property
    def data(self) -> NDArray[np.uint8] | None:
        """None: tokens are always copied."""
        return None

    @cached_property
    def file(self) -> None:
        """None: the tokens are not in one file."""
        return None

    def _bytes(self, start: int, stop: int) -> NDArray[np.uint8]:
        """A copy, block by block."""
        blocks, before = self._blocks, int(self._blocks.layout.blocks_before[self._shard]) * BLOCK_BYTES
        buffer, start, stop = np.empty(stop - start, np.uint8), before + start, before + stop
        for block in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)) if len(buffer) else ():
            first, last = max(start, block * BLOCK_BYTES), min(stop, (block + 1) * BLOCK_BYTES)
            copy = partial(np.copyto, buffer[first - start : last - start], blocks.mapped[first:last])
            while not blocks.read(np.array([block]), copy):
                pass  # evicted by others before it was copied
        return buffer

    def read_fault(self, byte: int, error: int) -> MdataError:
        """The error for a byte of the .bin that the file of blocks did not give."""
        return DamageError(
            f"the cached blocks of {self.bin_path.name} were truncated, or the disk fails",
            found=f"no byte {byte}",
            fix=f"stop all processes that use the cache, remove {self.idx_path.parent.parent}, and run again",
        )


class CachedGatherer(Gatherer):
    """Rows from pairs whose tokens are in storage."""

    def __init__(self, readers: Sequence[CachedReader], blocks: CorpusBlocks) -> None:
        super().__init__(readers)
        self._blocks, self._layout = blocks, blocks.layout
        self._noting = threading.local()

    @cached_property
    def _store(self) -> TokenStore:
        layout, data = self._layout, self._blocks.mapped
        starts = (layout.blocks_before[:-1] * BLOCK_BYTES).tolist()
        parts = zip(starts, layout.shard_bytes.tolist(), self._readers, strict=True)
        shards: list[tuple[NDArray[np.uint8] | None, PooledFile | None, int]]
        shards = [(data[start : start + size], None, reader.num_tokens) for start, size, reader in parts]
        return TokenStore(self._readers[0].dtype.name, shards)

    @contextmanager
    def noted(self) -> Iterator[list[Int64s]]:
        """While the code inside runs, this thread reads nothing; the list gets the blocks that its reads would need."""
        self._noting.blocks = noted = list[Int64s]()
        try:
            yield noted
        finally:
            del self._noting.blocks

    def gather(
        self,
        first: Int64s,
        count: Int64s,
        *,
        out: Int64s,
        ends: Int64s | None = None,
        out_rows: Int64s | None = None,
        fill: int = 0,
        threads: int = 1,
    ) -> None:
        """As `Gatherer.gather`.

        Raises:
            as there, and what `CorpusBlocks.read` raises.
        """
        copy = partial(super().gather, ends=ends, out_rows=out_rows, fill=fill, threads=threads)
        if _outside(first, count, int(self._layout.tokens_before[-1])):
            return copy(first, count, out=out)  # which raises
        blocks = self._layout.of_runs(first, count)
        noted: list[Int64s] | None = getattr(self._noting, "blocks", None)
        if noted is not None:
            noted.append(blocks)
            out.fill(0)  # ids that exist, for the code that goes on with the rows
            return None
        if len(blocks) <= self._blocks.at_once and self._blocks.read(blocks, partial(copy, first, count, out=out)):
            return None
        return self._by_pieces(first, count, out=out, ends=ends, out_rows=out_rows, fill=fill)

    def _by_pieces(
        self,
        first: Int64s,
        count: Int64s,
        *,
        out: Int64s,
        ends: Int64s | None,
        out_rows: Int64s | None,
        fill: int,
    ) -> None:
        """`gather` with one block at a time."""
        last_runs = np.arange(1, len(first) + 1) if ends is None else ends
        places = np.arange(len(last_runs)) if out_rows is None else out_rows
        begin = 0
        for place, end in zip(places.tolist(), last_runs.tolist(), strict=True):
            at = 0
            for run in range(begin, end):
                at = self._run_by_pieces(int(first[run]), int(count[run]), row=out[place], at=at)
            out[place, at:] = fill
            begin = end

    def _run_by_pieces(self, first: int, count: int, *, row: NDArray[Any], at: int) -> int:
        """Copy one run to row[at:]; the place after it."""
        end = first + count
        while first < end:
            taken = min(end, self._layout.end_of_block(first)) - first
            runs = np.array([first]), np.array([taken])
            copy = partial(super().gather, *runs, out=row[at : at + taken].reshape(1, -1))
            while not self._blocks.read(self._layout.of_runs(*runs), copy):
                pass  # evicted by others before it was copied
            first, at = first + taken, at + taken
        return at

    def read_native(
        self,
        permutation: Permutation,
        samples: Int64s,
        *,
        epoch: tuple[int, int, int],
        rows: RowArrays,
        finish: RowFinish,
        blocks: Blocks | None = None,
    ) -> tuple[NDArray[np.int32], int] | None:
        """Never done in one call: runs must be known before they are read.

        Raises:
            IndexError: always; the samples are then read by `gather`.
        """
        raise IndexError("read by gather")


def _outside(first: Int64s, count: Int64s, num_tokens: int) -> bool:
    if len(first) != len(count):
        return True
    return bool(len(first)) and bool((first < 0).any() or (count < 0).any() or (first > num_tokens - count).any())
