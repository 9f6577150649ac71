"""One document per row, in native order: shorter ones are padded, longer ones cut or left out.

Sample k is one document, chosen by the permutation of the native order over the documents of the range; its position is
looked up in the index. A longer document gives its first S + 1 tokens (S without the extra token) and the rest is not
read. If longer ones are left out (and with them those of less than two tokens, which have nothing to predict), the
documents are counted in blocks once, at opening: 8 bytes for 512 documents, and no stored order. Cutting needs no such
pass; an empty document is then a row without loss.
"""

from __future__ import annotations

import numpy as np

from mdata.corpus.corpus import Corpus
from mdata.errors import UsageError, counted
from mdata.order.native_order import OrderKey, StreamOrder
from mdata.samples.base import NativelyOrdered, SamplePiece, pieces_of_runs, samples_at
from mdata.samples.rows import Gathered, RowOptions
from mdata.samples.sample_options import LEAST, Longer
from mdata.util.arrays import Int64s, locate_all

_BLOCK = 512
_COUNTED_AT_ONCE = _BLOCK * 512


class DocumentSamples(NativelyOrdered):
    """The documents of one range of a corpus, one per sample; can be pickled if the corpus can.

    Args:
        corpus: its sequences must be contiguous on disk.
        documents: the range [first, last).
        options: tokens per sample, S, and which masks and positions its rows have.
        seed: the run's seed.
        shuffle: false for validation and test: file order, one pass.
        extra_token: whether a sample reads one more token than S, so that its last token has a label.
        longer: documents of more tokens than a sample reads are cut, or left out together with those of less than two.

    Raises:
        UsageError: no document is left.
    """

    def __init__(
        self,
        corpus: Corpus,
        documents: tuple[int, int],
        *,
        options: RowOptions,
        seed: int,
        extra_token: bool = True,
        shuffle: bool = True,
        longer: Longer = "cut",
    ) -> None:
        self.corpus = corpus
        self.options = options
        self.longer = longer
        self.first, self.last = documents
        self._longest = options.sequence_length + int(extra_token)
        self._offsets = self._count_blocks() if longer == "drop" else None
        total = self.last - self.first if self._offsets is None else int(self._offsets[-1])
        if not total:
            raise UsageError(
                "no document fits into a row",
                found=f"{counted(self.last - self.first, 'document')} for sequence length {options.sequence_length}",
                fix='a longer sequence length, or longer="cut"',
            )
        # One "token" per document: a stream order whose samples are single entries.
        self.order = StreamOrder(total, 1, key=OrderKey(seed, corpus.id), extra_token=False, shuffle=shuffle)

    def gather(self, samples: Int64s, text: Int64s, *, out_rows: Int64s | None = None, threads: int = 1) -> Gathered:
        """Fill rows with samples; see `RowSamples`."""
        first, count = self.corpus.gatherer.documents(self.documents(samples))
        count = np.minimum(count, self._longest)
        self.corpus.gatherer.gather(first, count, out=text, out_rows=out_rows, threads=threads)
        cuts = (np.zeros(len(count), np.int64), np.empty(0, np.int32)) if self.options.document_masks else None
        return Gathered(count, cuts)

    def documents(self, samples: Int64s) -> Int64s:
        """The document of each sample, int64[n]."""
        positions = self.order.starts(samples)
        if self._offsets is None:
            return positions + self.first
        blocks, inside = locate_all(self._offsets, positions)
        return np.array([self._kept_in(*pair) for pair in zip(blocks.tolist(), inside.tolist(), strict=True)], np.int64)

    def pieces(self, sample: int) -> list[SamplePiece]:
        """The sequences that a sample reads; see `Samples`."""
        first, count = self.corpus.gatherer.documents(self.documents(np.array([sample])))
        run = int(first[0]), min(int(count[0]), self._longest)
        return pieces_of_runs(self.corpus, [run], sequences=range(self.corpus.num_sequences))

    def samples_of(self, sequence: int, *, first: int, stop: int) -> list[int]:
        """Samples that read a token of a sequence; see `Samples`."""
        document = self.corpus.document_of(sequence)
        if not self.first <= document < self.last:
            raise IndexError(f"document {document} outside of {self.first} to {self.last}")
        start, end = self.corpus.token_bounds(sequence, sequence + 1)
        begins = int(self.corpus.gatherer.documents(np.array([document]))[0][0])
        if start == end or start - begins >= self._longest:
            return []
        place = self._place_of(document)
        return [] if place is None else samples_at(self.order, place, first=first, stop=stop)

    def _place_of(self, document: int) -> int | None:
        """The position of a document in the order; None if it is left out."""
        if self._offsets is None:
            return document - self.first
        block, inside = divmod(document - self.first, _BLOCK)
        fits = self._fits(document - inside, document + 1)
        return int(self._offsets[block]) + int(fits[:-1].sum()) if fits[-1] else None

    def _fits(self, first: int, last: int) -> np.ndarray:
        """bool[last - first]: which documents are neither too long nor too short."""
        count = self.corpus.gatherer.documents(np.arange(first, last))[1]
        return (count >= min(LEAST, self._longest)) & (count <= self._longest)

    def _kept_in(self, block: int, place: int) -> int:
        """The document at an index among those of a block that fit."""
        first = self.first + block * _BLOCK
        return first + int(np.flatnonzero(self._fits(first, min(first + _BLOCK, self.last)))[place])

    def _count_blocks(self) -> Int64s:
        """Number of fitting documents before each block, and in total."""
        counts = [np.zeros(1, np.int64)]
        for first in range(self.first, self.last, _COUNTED_AT_ONCE):
            fits = self._fits(first, min(first + _COUNTED_AT_ONCE, self.last))
            counts.append(np.add.reduceat(fits.astype(np.int64), np.arange(0, len(fits), _BLOCK)))
        return np.cumsum(np.concatenate(counts))
