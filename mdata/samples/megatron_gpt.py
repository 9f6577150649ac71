"""GPT samples in Megatron's order, equal to those of its GPTDataset bit for bit.

A sample concatenates the parts of documents that the three arrays of `mdata.order.megatron_order` name. As in Megatron,
padding is recognized by value (`rows`). What differs: Megatron reuses the loss mask of the first sample that is read,
with its zeros, for all others; here each sample has its own. The arrays are built when the samples are opened, or found
in the cache (mdata/array_cache/cache.py); processes that unpickle samples map the cached arrays.
"""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np

from mdata.array_cache.cache import Cache
from mdata.array_cache.store import Arrays
from mdata.corpus.corpus import Corpus
from mdata.indexed.gather import Cuts
from mdata.order.megatron_order import MegatronIndices, MegatronRequest, build, plan
from mdata.samples.base import RowSamples, SamplePiece
from mdata.samples.rows import NO_PAD, Gathered, RowOptions
from mdata.util.arrays import Int64s, running_sums
from mdata.util.pickling import PickledByArguments

VERSION = 1  # version of how the arrays are built


class MegatronGptSamples(PickledByArguments, RowSamples):
    """The samples of one range of a corpus in Megatron's order; can be pickled if the corpus can.

    Args:
        corpus: the sequences.
        request: range, length, number of samples, seed.
        options: which masks and positions rows have; `pad` is Megatron's effective pad id (`effective_pad`).
        threads: for building the arrays.
        cache: keeps the arrays; None: they are built in memory.

    Raises:
        UsageError: a split without tokens, or an invalid request.
    """

    def __init__(
        self,
        corpus: Corpus,
        request: MegatronRequest,
        *,
        options: RowOptions,
        threads: int = 1,
        cache: Cache | None = None,
    ) -> None:
        self.corpus = corpus
        self.request = request
        self.options = options
        arrays = self._build(threads)[0] if cache is None else self._kept(cache, threads)
        self.indices = MegatronIndices(**arrays)

    def _build(self, threads: int) -> list[Arrays]:
        return [vars(build(self.corpus.lengths, self.request, threads=threads))]

    def _kept(self, cache: Cache, threads: int) -> Arrays:
        def make() -> list[Arrays]:
            cache.progress.begin(f"arranging the Megatron order of {self.corpus.path.name}", None, unit="samples")
            built = self._build(threads)
            cache.progress.advance(len(built[0]["shuffle"]))
            cache.progress.end()
            return built

        def entries() -> int:
            sizes = plan(self._num_tokens, self.request)
            return sizes.epochs * (self.request.stop - self.request.first) + 3 * sizes.samples

        key = {"name": "megatron-gpt", "version": VERSION, "corpus": self.corpus.id, **asdict(self.request)}
        return cache.arrays(self.corpus.path, key, make=make, entries=entries)

    @property
    def num_samples(self) -> int:
        """Number of samples: the requested number or more, as in Megatron."""
        return len(self.indices.shuffle)

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one pass over the corpus; the rest of an epoch goes into the next one's first sample."""
        return max(1, (self._num_tokens - int(self.request.extra_token)) // self.request.sequence_length)

    def epochs(self, num_samples: int) -> float:
        """How many passes over the corpus this number of samples makes."""
        return num_samples * self.request.sequence_length / self._num_tokens

    def same_for(self, num_samples: int) -> bool:
        """Whether the samples stay the same if this many are requested; nothing is built.

        They depend on the request by the number of epochs, and by whether the last one is shuffled separately.
        """
        tokens = self._num_tokens
        return plan(tokens, replace(self.request, num_samples=num_samples)) == plan(tokens, self.request)

    @property
    def _num_tokens(self) -> int:
        return int(self.corpus.lengths[self.request.first : self.request.stop].sum(dtype=np.int64))

    def gather(self, samples: Int64s, text: Int64s, *, out_rows: Int64s | None = None, threads: int = 1) -> Gathered:
        """Fill rows with samples; see `RowSamples`."""
        if samples.size and (samples.min() < 0 or samples.max() >= self.num_samples):
            raise IndexError(f"samples {samples.min()} to {samples.max()} of {self.num_samples}")
        rows = self.indices.shuffle[samples].astype(np.int64)
        spans = np.concatenate((self.indices.samples[rows], self.indices.samples[rows + 1]), axis=1, dtype=np.int64)
        extra = int(self.request.extra_token)
        gatherer = self.corpus.gatherer
        ends, first, count = gatherer.pieces(self.indices.documents, spans.reshape(-1), extra=extra)
        pad = NO_PAD if self.options.pad is None else self.options.pad
        gatherer.gather(first, count, ends=ends, out=text, out_rows=out_rows, fill=pad, threads=threads)
        before = running_sums(count)
        counts = np.diff(before[ends], prepend=0)
        cuts = self._cuts(ends, before, counts) if self.options.document_masks else None
        return Gathered(counts, cuts)

    def _cuts(self, ends: Int64s, before: Int64s, counts: Int64s) -> Cuts:
        """Where pieces begin inside the inputs of each row; counts empty pieces, as Megatron does.

        The last piece loses the token that is only a label, and is dropped if that was its only token; it also covers
        the padding of a row.
        """
        runs = np.diff(ends, prepend=0)
        row_of = np.repeat(np.arange(len(ends)), runs)
        places = before[:-1] - (before[ends] - counts)[row_of]
        first_of_row = np.zeros(len(places), np.bool_)
        first_of_row[(ends - runs)[runs > 0]] = True
        last_is_label = np.zeros(len(places), np.bool_)
        if self.request.extra_token:
            last_is_label[ends[runs > 0] - 1] = (before[ends] - before[ends - 1])[runs > 0] == 1
        counted = ~first_of_row & ~last_is_label
        return np.cumsum(np.bincount(row_of[counted], minlength=len(ends))).astype(np.int64), places[counted].astype(
            np.int32
        )

    def pieces(self, sample: int) -> list[SamplePiece]:
        """The sequences that a sample reads; see `Samples`."""
        row = int(self.indices.shuffle[sample])
        first, last = int(self.indices.samples[row, 0]), int(self.indices.samples[row + 1, 0])
        pieces = []
        for place in range(first, last + 1):
            sequence = int(self.indices.documents[place])
            begin, end = self._reads(row, place, self.corpus.length_of(sequence))
            pieces += [SamplePiece(sequence, begin, end - begin)] if end > begin else []
        return pieces

    def samples_of(self, sequence: int, *, first: int, stop: int) -> list[int]:
        """Samples that read a token of a sequence; see `Samples`. Searches all three arrays."""
        if not self.request.first <= sequence < self.request.stop:
            raise IndexError(f"sequence {sequence} outside of {self.request.first} to {self.request.stop}")
        length, begins = self.corpus.length_of(sequence), np.ascontiguousarray(self.indices.samples[:, 0])
        rows = set()
        for place in np.flatnonzero(self.indices.documents == sequence).tolist():
            # Row r reads from begins[r] to begins[r + 1]; the part at either end may be empty.
            near = range(np.searchsorted(begins[1:], place), np.searchsorted(begins[:-1], place, side="right"))
            rows |= {row for row in near if np.less(*self._reads(row, place, length))}
        samples = np.flatnonzero(np.isin(self.indices.shuffle[first:stop], list(rows))) + first
        return [int(sample) for sample in samples]

    def _reads(self, row: int, place: int, length: int) -> tuple[int, int]:
        """The tokens [begin, end) that a row reads of the sequence at a position of the order."""
        (first, offset), (last, end) = self.indices.samples[row : row + 2].tolist()
        return offset if place == first else 0, end + int(self.request.extra_token) if place == last else length
