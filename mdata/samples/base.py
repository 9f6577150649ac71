"""The interface of every kind of sample, single samples of kinds whose rows are text, and the sequences of a sample.

Dense attention masks are made here, only for single samples and only on request: for whole batches they would be S
times as large as the text. In native order the samples that read a sequence are found without a scan, by the inverse of
a permutation. Components, documents and steps are in mdata/tracing/tracer.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mdata.corpus.corpus import Corpus
from mdata.order.native_order import StreamOrder
from mdata.samples.rows import Gathered, RowOptions, Sample, empty_rows, finish
from mdata.util.arrays import Int64s


class SamplePiece(NamedTuple):
    """A run of tokens of one sequence: the sequence's number in the corpus, the run's first token in it, its length."""

    sequence: int
    first: int
    length: int


class Samples(Protocol):
    """A kind of sample."""

    @property
    def num_samples(self) -> int | None:
        """Number of samples; None if endless."""

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one pass over the corpus."""

    def epochs(self, num_samples: int) -> float:
        """Passes over the corpus in this number of samples."""

    def sample(self, k: int) -> Sample:
        """One sample; for rows of text see `RowSamples.sample`."""

    def pieces(self, sample: int) -> list[SamplePiece]:
        """The pieces that a sample reads, in order; padding and pieces without tokens are left out."""

    def samples_of(self, sequence: int, *, first: int, stop: int) -> list[int]:
        """Samples in [first, stop) that read a token of a sequence, in ascending order.

        Raises:
            IndexError: the sequence is not in the part of the corpus that the samples cover.
        """


class RowSamples(Samples, Protocol):
    """A kind of sample whose rows are text."""

    options: RowOptions

    def gather(self, samples: Int64s, text: Int64s, *, out_rows: Int64s | None = None, threads: int = 1) -> Gathered:
        """Read samples int64[n] into rows of text[m, S + 1]: sample i into row out_rows[i] (None: row i).

        Raises:
            IndexError: a number below 0 or past the end.
        """

    def sample(self, k: int) -> Sample:
        """Sample k as {tokens int64[S], labels int64[S], loss_mask float32[S]}, and the fields of its options.

        `labels[i]` is the token after `tokens[i]`; if there is none, the mask and the label are 0. Also, in this order:
        attention_mask bool[1, S, S], position_ids int64[S], cu_seqlens int32[S + 1] (running lengths of documents from
        0, filled up with S) and max_seqlen int32[].
        """
        options = self.options
        rows = empty_rows(1, options)
        gathered = self.gather(np.array([k], np.int64), rows.text)
        length = options.sequence_length
        cuts = [] if gathered.cuts is None else gathered.cuts[1].tolist()
        sample: Sample = {"tokens": rows.tokens[0], "labels": rows.labels[0]}
        if options.attention_mask:  # before padding is overwritten
            sample["attention_mask"] = attention_mask(rows.tokens[0], options, cuts=cuts)
        rows = finish(rows, gathered, options=options)
        sample["loss_mask"] = rows.loss_mask[0]
        if rows.position_ids is not None:
            sample["position_ids"] = rows.position_ids[0]
        if options.document_masks:
            sample |= _lengths_of_documents(cuts, length)
        return sample


class NativelyOrdered(RowSamples):
    """Shared code of the kinds of samples in native order."""

    order: StreamOrder

    @property
    def num_samples(self) -> int | None:
        """Number of samples; None if endless."""
        return self.order.num_samples

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in one pass over the corpus."""
        return self.order.samples_per_epoch

    def epochs(self, num_samples: int) -> float:
        """Passes over the corpus in this number of samples."""
        return num_samples / self.order.samples_per_epoch


def attention_mask(tokens: Int64s, options: RowOptions, *, cuts: list[int]) -> npt.NDArray[np.bool_]:
    """bool[1, S, S]: true where row i must not attend to column j: later tokens, and optionally earlier documents."""
    mask = ~np.tri(len(tokens), dtype=np.bool_)
    starts = list(cuts) if options.document_masks else []
    if options.reset_attention_mask and options.eod is not None:
        starts += (np.flatnonzero(tokens == options.eod) + 1).tolist()
    for start in starts:
        mask[start:, :start] = True
    return mask[None]


def _lengths_of_documents(cuts: list[int], length: int) -> Sample:
    starts = [0, *cuts, length]
    if len(starts) > length + 1:
        starts = sorted(set(starts))  # empty documents leave no room for them all
    filled = starts + [length] * (length + 1 - len(starts))
    longest = max(stop - start for start, stop in pairwise(starts))
    return {"cu_seqlens": np.array(filled, np.int32), "max_seqlen": np.array(longest, np.int32)}


def pieces_of_runs(corpus: Corpus, runs: Iterable[tuple[int, int]], *, sequences: range) -> list[SamplePiece]:
    """Runs of the token stream, (first token, number of tokens), as pieces of sequences."""
    pieces = []
    for first, count in runs:
        # The last sequence that begins at or before the token contains it: empty ones come first.
        place = bisect_right(sequences, first, key=lambda i: corpus.token_bounds(i, i)[0]) - 1
        while count:
            start, stop = corpus.token_bounds(sequences[place], sequences[place] + 1)
            taken = min(count, stop - first)
            if taken:
                pieces.append(SamplePiece(sequences[place], first - start, taken))
            first, count, place = first + taken, count - taken, place + 1
    return pieces


def samples_at(order: StreamOrder, place: int, *, first: int, stop: int) -> list[int]:
    """Samples in [first, stop) that read entry `place`, ascending, where each sample of the order is one entry."""
    epochs = range(first // order.samples_per_epoch, -(-stop // order.samples_per_epoch)) if order.shuffle else range(1)
    samples = [order.sample_at(epoch, place) for epoch in epochs]
    return [sample for sample in samples if sample is not None and first <= sample < stop]
