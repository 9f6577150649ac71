"""Reads many rows of tokens at once from the pairs of a corpus, in C++ without the GIL.

Tokens, sequences and documents are counted over all pairs, in order. If a file or an index has changed, a DamageError
names the file and the field. Before the first use of a table every .idx of the corpus is compared with its hash,
several at a time. Whether its tables are consistent is not checked in advance as in `IndexedReader`: C++ checks the
entries that it uses. Slow twins: tests/reference/gather.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mdata._core import BlockShuffle, Permutation, RowRules, SequenceIndex, TokenStore, read_native
from mdata.errors import DamageError, MdataError
from mdata.indexed.reader import IndexedReader, compare_all
from mdata.util.arrays import Int64s

Cuts = tuple[Int64s, npt.NDArray[np.int32]]
"""Row i has the places up to ends[i]: (ends, places)."""
RowArrays = tuple[Int64s, npt.NDArray[np.float32] | None, Int64s | None]
"""Text int64[n, S + 1], loss float32[n, S], positions int64[n, S]."""


@dataclass(frozen=True)
class Blocks:
    """The permutation of sequences inside blocks in one epoch: (lower, upper) 64 bits of its key."""

    core: BlockShuffle
    key: tuple[int, int]


class BlockPieces(NamedTuple):
    """The runs of row i end at ends[i]: first token and number of tokens of each; `cuts`: where they begin in a row."""

    ends: Int64s
    first: Int64s
    counts: Int64s
    cuts: Cuts


@dataclass(frozen=True)
class RowFinish:
    """How `Gatherer.read_native` finishes rows: whether it finds document cuts, the rules of masks, threads."""

    cuts: bool
    rules: RowRules
    threads: int = 1


class _Faults:
    """Turns an index error from C++ into a DamageError; errors in the caller's numbers pass through."""

    def __init__(self, readers: tuple[IndexedReader, ...]) -> None:
        self._readers = readers

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # An IndexError is a LookupError too. Raising it "from" itself would keep the rows alive until a garbage
        # collection.
        if kind is LookupError and error is not None:
            shard, table, entry = error.args
            of = "document" if table == "boundary" else "sequence"
            raise DamageError(
                f"{self._readers[shard].idx_path}: bad {table} of {of} {entry}",
                expected="an offset inside .bin, after the one before it",
                fix="mdata verify lists all damage; make the pair again, or fetch both files of it again",
            ) from error


class Gatherer:
    """Reads rows from pairs that share one token type."""

    def __init__(self, readers: Sequence[IndexedReader]) -> None:
        self._readers = tuple(readers)
        self._faults = _Faults(self._readers)

    @cached_property
    def _store(self) -> TokenStore:
        shards = [(r.data, r.file, r.num_tokens) for r in self._readers]
        return TokenStore(self._readers[0].dtype.name, shards)

    @cached_property
    def _index(self) -> SequenceIndex:
        compare_all(self._readers)
        shards = []
        for reader in self._readers:
            tables = reader.tables
            as_bytes = [table.view(np.uint8) for table in (tables.lengths, tables.pointers, tables.boundaries)]
            shards.append((as_bytes[0], as_bytes[1], as_bytes[2], reader.num_tokens))
        return SequenceIndex(self._readers[0].dtype.itemsize, shards)

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
        """Read runs of tokens into rows; see `mdata._core.TokenStore.gather`.

        Raises:
            IndexError: a run outside the tokens. ValueError: runs longer than their row.
            DamageError: a file is shorter than when it was opened (mode "pread"). ResourceError: it cannot be read.
        """
        fault = self._store.gather(first, count, ends, out_rows, out, fill, threads)
        if fault is not None:
            raise self._read_fault(*fault)

    def cuts(self, starts: Int64s, counts: Int64s) -> Cuts:
        """Positions inside tokens [start, start + count) at which a non-empty document begins.

        Raises:
            DamageError: an impossible entry in an .idx.
        """
        with self._faults:
            return self._index.cuts(starts, counts)

    def pieces(self, order: npt.NDArray[Any], spans: Int64s, *, extra: int) -> tuple[Int64s, Int64s, Int64s]:
        """Runs of samples of Megatron's order: (ends, first, count); see `mdata._core.SequenceIndex.pieces`.

        Raises:
            DamageError: an impossible entry in an .idx.
        """
        with self._faults:
            return self._index.pieces(order, spans, extra)

    def documents(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """First token and number of tokens of each document.

        Raises:
            DamageError: an impossible entry in an .idx.
        """
        with self._faults:
            return self._index.documents(numbers)

    def odd_sequences(self, starts: Int64s, counts: Int64s) -> npt.NDArray[np.uint8]:
        """For each token of the concatenated runs: 1 if its sequence has an odd number in its document.

        Raises:
            DamageError: an impossible entry in an .idx.
        """
        with self._faults:
            return self._index.odd_sequences(starts, counts)

    def block_shuffle(self, sequences: tuple[int, int], block: int) -> BlockShuffle:
        """Sequences [first, last), permuted inside blocks of this many; see `mdata._core.BlockShuffle`.

        Raises:
            DamageError: an impossible entry in an .idx.
        """
        with self._faults:
            return BlockShuffle(self._index, *sequences, block)

    def block_pieces(
        self, blocks: Blocks, starts: Int64s, *, counts: Int64s, inputs: int, threads: int = 1
    ) -> BlockPieces:
        """Runs of rows of the permuted stream and where they begin in a row.

        Raises:
            IndexError: tokens outside the range. DamageError: an impossible entry in an .idx.
        """
        with self._faults:
            pieces = blocks.core.pieces(*blocks.key, starts, counts, inputs, threads)
        ends, first, count, cut_ends, cut_places = pieces
        return BlockPieces(ends, first, count, (cut_ends, cut_places))

    def block_place(self, blocks: Blocks, sequence: int) -> tuple[int, int]:
        """The first token of a sequence in the permuted stream, and how many it has.

        Raises:
            IndexError: a sequence outside the range. DamageError: an impossible entry in an .idx.
        """
        with self._faults:
            return blocks.core.place(*blocks.key, sequence)

    def read_native(
        self,
        permutation: Permutation,
        samples: Int64s,
        *,
        epoch: tuple[int, int, int],
        rows: RowArrays,
        finish: RowFinish,
        blocks: Blocks | None = None,
    ) -> tuple[npt.NDArray[np.int32], int] | None:
        """Samples of one epoch of the native order, of the file or of the permuted stream; see `mdata._core`.

        Raises:
            IndexError: a sample of another epoch. DamageError, ResourceError: as `gather` and `cuts`.
        """
        index = self._index if finish.cuts else None
        core, key = (blocks.core, blocks.key) if blocks else (None, (0, 0))
        with self._faults:
            fault, documents = read_native(
                self._store, index, permutation, samples, epoch, rows, finish.rules, finish.threads, core, key
            )
        if fault is not None:
            raise self._read_fault(*fault)
        return documents

    def _read_fault(self, shard: int, byte: int, error: int) -> MdataError:
        return self._readers[shard].read_fault(byte, error)
