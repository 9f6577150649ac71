"""GPT samples in native order: S tokens of concatenated documents and the tokens after them as labels.

A sample is one run of the corpus' token stream that the order chose, so it costs one read. A sample that the order
lets end early (the last of a validation pass) is filled up with zeros that the loss mask leaves out: padding is known
by place, never by value. Where documents begin inside of a sample is looked up in the index, only if asked for. Not
done here: packing of whole documents, fill-in-the-middle.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mdata.indexed.gather import Gatherer, Int64s, Told
from mdata.order.native import NativeOrder, OrderKey
from mdata.samples.rows import Gathered, RowOptions, Rows, Sample, sample_of


class TokenStream(Protocol):
    """What a sample needs of a corpus (`mdata.corpus.Corpus` is one)."""

    @property
    def id(self) -> str:
        """The corpus id; it keys the order."""

    @property
    def gatherer(self) -> Gatherer:
        """Reads many rows at once."""

    def token_bounds(self, first_sequence: int, last_sequence: int) -> tuple[int, int]:
        """The stream's token numbers [start, stop) of sequences [first_sequence, last_sequence)."""


class GptSamples:
    """The samples of one range of a corpus in native order; can be pickled if the corpus can.

    Args:
        corpus: the stream of tokens.
        sequences: the range of sequences [first, last), from `split_range`.
        options: tokens a sample, S, and what is told of its rows.
        seed: the run's seed.
        extra_token: whether a sample reads one token more than S, so that its last token has a label.
        shuffle: false for validation and test: file order, one pass, the last partial sample kept.

    Raises:
        UsageError: the range holds less than one sample.
    """

    def __init__(
        self,
        corpus: TokenStream,
        sequences: tuple[int, int],
        *,
        options: RowOptions,
        seed: int,
        extra_token: bool = True,
        shuffle: bool = True,
    ) -> None:
        self.corpus = corpus
        self.options = options
        self._sequences = sequences
        self.first_token, self.last_token = corpus.token_bounds(*sequences)
        self.order = NativeOrder(
            self.last_token - self.first_token,
            options.sequence_length,
            key=OrderKey(seed, corpus.id),
            extra_token=extra_token,
            shuffle=shuffle,
        )
        self._length = options.sequence_length + int(extra_token)
        self._told = Told(options.document_masks, options.rules)
        self._full: NDArray[np.int64] = np.full(1, self._length, np.int64)

    @property
    def num_samples(self) -> int | None:
        """How many samples there are; None without end."""
        return self.order.num_samples

    @property
    def samples_per_epoch(self) -> int:
        """How many samples read the corpus once."""
        return self.order.samples_per_epoch

    def token_range(self, sample: int) -> tuple[int, int]:
        """The tokens [start, stop) of the corpus' stream that a sample reads, the last label included."""
        start = self.first_token + self.order.start(sample)
        return start, min(start + self._length, self.last_token)

    def epochs(self, num_samples: int) -> float:
        """How many times so many samples read the corpus."""
        return num_samples / self.order.samples_per_epoch

    def gather(self, samples: Int64s, text: Int64s, *, places: Int64s | None = None, threads: int = 1) -> Gathered:
        """Fill rows with samples; see `RowKind`."""
        starts = self.order.starts(samples)
        starts += self.first_token
        counts = self._counts(starts)
        self.corpus.gatherer.gather(starts, counts, out=text, places=places, threads=threads)
        if not self.options.document_masks:
            return Gathered(counts)
        return Gathered(counts, self.corpus.gatherer.cuts(starts, np.minimum(counts, self.options.sequence_length)))

    def read(self, samples: Int64s, rows: Rows, *, threads: int = 1) -> Rows | None:
        """Rows filled in by one call into C++, if the samples are of one epoch; else None, and nothing is lost.

        Raises:
            DamageError, ResourceError: as `gather`.
        """
        first = int(samples[0]) if len(samples) else -1
        if first < 0 or not self.order.shuffle:
            return None
        before, offset, permutation = self.order.epoch_of(first)
        if threads != self._told.threads:
            self._told = Told(self.options.document_masks, self.options.rules, threads)
        try:
            cu_seqlens, longest = self.corpus.gatherer.read_native(
                permutation.core,
                samples,
                epoch=(before, offset + self.first_token, self._length),
                rows=(rows.text, rows.loss_mask, rows.position_ids),
                told=self._told,
            )
        except IndexError:
            return None
        if cu_seqlens is None:
            return rows
        return Rows(rows.text, rows.loss_mask, rows.position_ids, cu_seqlens=cu_seqlens, max_seqlen=longest)

    def _counts(self, starts: Int64s) -> Int64s:
        """Real tokens of each sample."""
        if not self.order.shuffle:
            return np.minimum(self._length, self.last_token - starts)
        if len(self._full) != len(starts):
            self._full = np.full(len(starts), self._length, np.int64)
        return self._full

    def sample(self, k: int) -> Sample:
        """Sample k; see `sample_of`. Without the extra token no last place of a sample has loss."""
        return sample_of(self, k)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (
            self.corpus,
            self._sequences,
            self.options,
            self.order.key.seed,
            self.order.extra_token,
            self.order.shuffle,
        )


def _rebuild(
    corpus: TokenStream, sequences: tuple[int, int], options: RowOptions, seed: int, extra_token: bool, shuffle: bool
) -> GptSamples:
    return GptSamples(corpus, sequences, options=options, seed=seed, extra_token=extra_token, shuffle=shuffle)
