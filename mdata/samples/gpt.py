"""GPT samples in native order: S tokens of concatenated documents, with the next tokens as labels.

A sample is one run of the corpus' token stream, chosen by the order, so it costs one read. With `shuffle_block` each
epoch has another stream, with the sequences permuted inside fixed blocks: a sample is then a few runs, found by
arithmetic over the index (mdata_cpp/block_shuffle.hpp). A sample that ends early (the last of a validation pass) is
filled with zeros that the loss mask leaves out: padding is known by position, never by value. The beginnings of
documents inside a sample are looked up in the index only on request. Not done here: packing of whole documents,
fill-in-the-middle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache

import numpy as np

from mdata._core import BlockShuffle
from mdata.corpus.corpus import Corpus
from mdata.errors import DamageError
from mdata.indexed.gather import Blocks, RowFinish
from mdata.mixing.selection import MOST_SAMPLES
from mdata.order.native_order import OrderKey, StreamOrder
from mdata.samples.base import NativelyOrdered, SamplePiece, pieces_of_runs
from mdata.samples.rows import Gathered, RowOptions, Rows, in_order
from mdata.util.arrays import Int64s
from mdata.util.pickling import PickledByArguments


class GptSamples(PickledByArguments, NativelyOrdered):
    """The samples of one range of a corpus in native order; can be pickled if the corpus can.

    Args:
        corpus: the stream of tokens.
        sequences: the range of sequences [first, last), from `split_range`.
        options: tokens per sample, S, and which masks and positions its rows have.
        seed: the run's seed.
        extra_token: whether a sample reads one more token than S, so that its last token has a label.
        shuffle: false for validation and test: file order, one pass, the last partial sample kept.
        shuffle_block: sequences are permuted inside blocks of this many, differently in each epoch; 0, or without
            shuffling: they stay in file order. Document masks then separate sequences.

    Raises:
        UsageError: the range is shorter than one sample.
    """

    def __init__(
        self,
        corpus: Corpus,
        sequences: tuple[int, int],
        *,
        options: RowOptions,
        seed: int,
        extra_token: bool = True,
        shuffle: bool = True,
        shuffle_block: int = 0,
    ) -> None:
        self.corpus = corpus
        self.options = options
        self.shuffle_block = shuffle_block if shuffle else 0
        self._sequences = sequences
        self.first_token, self.last_token = corpus.token_bounds(*sequences)
        self.order = StreamOrder(
            self.last_token - self.first_token,
            options.sequence_length,
            key=OrderKey(seed, corpus.id),
            extra_token=extra_token,
            shuffle=shuffle,
        )
        self._length = options.sequence_length + int(extra_token)
        self._finish = RowFinish(options.document_masks, options.rules)
        self._full = Gathered(np.full(1, self._length, np.int64))

    def token_range(self, sample: int) -> tuple[int, int]:
        """The tokens [start, stop) of its epoch's stream that a sample reads, including the last label.

        The stream is that of the corpus, unless sequences are permuted: then only the range is the same.
        """
        start = self.first_token + self.order.start(sample)
        return start, min(start + self._length, self.last_token)

    def runs(self, sample: int) -> list[tuple[int, int]]:
        """The corpus' tokens that a sample reads, in order: (first token, number of tokens)."""
        start, stop = self.token_range(sample)
        if not self.shuffle_block:
            return [(start, stop - start)]
        blocks = self._blocks(sample // self.samples_per_epoch)
        counts = np.array([stop - start])
        with _placed_by_the_index(self.corpus):
            _, first, count, _ = self.corpus.gatherer.block_pieces(blocks, np.array([start]), counts=counts, inputs=0)
        return list(zip(first.tolist(), count.tolist(), strict=True))

    def pieces(self, sample: int) -> list[SamplePiece]:
        """The sequences that a sample reads, in order: (number in the corpus, first token in it, number of tokens)."""
        return pieces_of_runs(self.corpus, self.runs(sample), sequences=range(*self._sequences))

    def samples_of(self, sequence: int, *, first: int, stop: int) -> list[int]:
        """Samples in [first, stop) that read a token of a sequence, in ascending order.

        Raises:
            IndexError: a sequence outside the range.
        """
        if not self._sequences[0] <= sequence < self._sequences[1]:
            raise IndexError(f"sequence {sequence} outside of {self._sequences[0]} to {self._sequences[1]}")
        start, end = self.corpus.token_bounds(sequence, sequence + 1)
        num_tokens = end - start
        samples: list[int] = []
        epochs = range(first // self.samples_per_epoch, -(-stop // self.samples_per_epoch)) if num_tokens else ()
        for epoch in epochs if self.order.shuffle else epochs[:1]:
            if self.shuffle_block:
                with _placed_by_the_index(self.corpus):
                    start, _ = self.corpus.gatherer.block_place(self._blocks(epoch), sequence)
            samples += self.order.samples_reading(epoch, start - self.first_token, count=num_tokens)
        return sorted(sample for sample in samples if first <= sample < stop)

    def gather(self, samples: Int64s, text: Int64s, *, out_rows: Int64s | None = None, threads: int = 1) -> Gathered:
        """Fill rows with samples; see `RowSamples`."""
        starts = self.order.starts(samples)
        starts += self.first_token
        counts = self._counts(starts)
        if self.shuffle_block and len(samples):
            return self._gather_runs(samples, starts, text, out_rows=out_rows, threads=threads)
        self.corpus.gatherer.gather(starts, counts, out=text, out_rows=out_rows, threads=threads)
        if not self.options.document_masks:
            return Gathered(counts)
        return Gathered(counts, self.corpus.gatherer.cuts(starts, np.minimum(counts, self.options.sequence_length)))

    def _gather_runs(
        self, samples: Int64s, starts: Int64s, text: Int64s, *, out_rows: Int64s | None, threads: int
    ) -> Gathered:
        """Rows of the permuted streams of their epochs."""
        gatherer, counts = self.corpus.gatherer, self._counts(starts)
        rows = np.arange(len(samples)) if out_rows is None else out_rows
        epochs = samples // self.order.samples_per_epoch
        parts: list[tuple[Int64s, Gathered]] = []
        for epoch in np.unique(epochs).tolist():
            chosen = np.flatnonzero(epochs == epoch)
            with _placed_by_the_index(self.corpus):
                ends, first, count, cuts = gatherer.block_pieces(
                    self._blocks(epoch),
                    starts[chosen],
                    counts=counts[chosen],
                    inputs=self.options.sequence_length,
                    threads=threads,
                )
            gatherer.gather(first, count, out=text, ends=ends, out_rows=rows[chosen], threads=threads)
            parts.append((chosen, Gathered(counts[chosen], cuts if self.options.document_masks else None)))
        return in_order(parts, len(samples))

    @cached_property
    def _shuffled(self) -> BlockShuffle:
        return self.corpus.gatherer.block_shuffle(self._sequences, self.shuffle_block)

    def _blocks(self, epoch: int) -> Blocks:
        return Blocks(self._shuffled, self._blocks_key(epoch))

    @cached_property
    def _blocks_key(self) -> Callable[[int], tuple[int, int]]:
        # Built when first needed: a blend may have thousands of these objects.
        return lru_cache(maxsize=16)(self._make_blocks_key)

    def _make_blocks_key(self, epoch: int) -> tuple[int, int]:
        key = self.order.key.blocks(epoch)
        return key.low, key.high

    def read(self, samples: Int64s, rows: Rows, *, threads: int = 1) -> Rows | None:
        """Fill rows by one call into C++ if the samples belong to one epoch; otherwise return None and do nothing.

        Raises:
            DamageError, ResourceError: as `gather`.
        """
        first = int(samples[0]) if len(samples) else -1
        if first < 0 or not self.order.shuffle:
            return None
        before, offset, permutation = self.order.epoch_of(first)
        if before + self.samples_per_epoch > MOST_SAMPLES:
            return None
        blocks = self._blocks(first // self.order.samples_per_epoch) if self.shuffle_block else None
        if threads != self._finish.threads:
            self._finish = RowFinish(self.options.document_masks, self.options.rules, threads)
        try:
            documents = self.corpus.gatherer.read_native(
                permutation.core,
                samples,
                epoch=(before, offset + self.first_token, self._length),
                rows=(rows.text, *rows.by_value),
                finish=self._finish,
                blocks=blocks,
            )
        except IndexError:
            return None
        return Rows(rows.text, rows.by_value, self.options, self._full_rows(len(samples)), documents)

    def _counts(self, starts: Int64s) -> Int64s:
        """Real tokens of each sample."""
        if not self.order.shuffle:
            return np.minimum(self._length, self.last_token - starts)
        return self._full_rows(len(starts)).counts

    def _full_rows(self, num_rows: int) -> Gathered:
        """The facts about this many rows without padding."""
        full = self._full  # another thread may store its own there meanwhile
        if len(full.counts) != num_rows:
            full = self._full = Gathered(np.full(num_rows, self._length, np.int64))
        return full


@contextmanager
def _placed_by_the_index(corpus: Corpus) -> Iterator[None]:
    """Positions of permuted sequences follow from the index alone: one outside it means a damaged index."""
    try:
        yield
    except IndexError as error:
        raise DamageError(
            f"corpus {corpus.id}: the sequences are not laid out as its manifest says",
            found=str(error),
            expected="sequences that follow each other and fill .bin",
            fix="mdata verify shows where; then make the pair again, or fetch both files and the manifest again",
        ) from error
