"""Chat samples in native order: whole conversations packed into rows, with loss only on trained tokens.

Rows are those of packed samples (packed.py). In a corpus of conversations (`mdata preprocess --chat`) sequences are
spans: context at 0, 2, 4 ... of a document, trained at 1, 3, 5 ...; so a label has loss if its token lies in a sequence
with an odd number and belongs to the document of its input. Conversations longer than a row are cut (every label is
still in one row), or left out. A cut may produce rows of context only. Slow twin: tests/reference/chat.py.

In a corpus of pairs a document is two conversations, each one half of its sequences; see mdata/preprocessing/
encode_chat.py. A pair is packed as a whole, and is two pieces of its row: piece 2i is the chosen conversation of pair
i, piece 2i + 1 the rejected one. These numbers depend only on corpus, range and rule, as rows do.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mdata.array_cache.store import Arrays
from mdata.corpus.corpus import Corpus
from mdata.errors import UsageError
from mdata.samples.packed import PackedSamples, PackingRule, fitted
from mdata.samples.rows import Gathered
from mdata.samples.sample_options import LEAST
from mdata.util.arrays import Int64s

LEVEL, PAIRS_LEVEL = "chat", "pairs"


class ChatSamples(PackedSamples):
    """The conversations of one range of a corpus, packed into rows; see `PackedSamples`."""

    def gather(self, samples: Int64s, text: Int64s, *, out_rows: Int64s | None = None, threads: int = 1) -> Gathered:
        """Fill rows with samples; see `RowSamples`."""
        gathered = super().gather(samples, text, out_rows=out_rows, threads=threads)
        _, pieces = self._pieces(self.order.starts(samples))
        odd = self.corpus.gatherer.odd_sequences(self._first[pieces], self._count[pieces].astype(np.int64))
        trained = np.zeros((len(samples), text.shape[1]), np.uint8)
        trained[np.arange(text.shape[1]) < gathered.counts[:, None]] = odd
        return Gathered(gathered.counts, gathered.cuts, trained[:, 1:])


def _pair_window(corpus: Corpus, begin: int, stop: int, rule: PackingRule) -> Arrays:
    """Pairs [begin, stop) in rows; those that fit into no row, or have half without a label, are left out."""
    starts, lengths = corpus.gatherer.documents(np.arange(begin, stop))
    middles = np.fromiter((_middle(corpus, number) for number in range(begin, stop)), np.int64, stop - begin)
    shorter = np.minimum(middles - starts, starts + lengths - middles)
    ends, of, _, counts = fitted(np.where((lengths > rule.row_length) | (shorter < LEAST), 0, lengths), rule)
    first, middle = starts[of], middles[of]
    halves = np.stack((middle - first, first + counts - middle), 1).astype(counts.dtype)
    return {"ends": 2 * ends, "first": np.stack((first, middle), 1).ravel(), "count": halves.ravel()}


def _middle(corpus: Corpus, pair: int) -> int:
    """The token with which the rejected conversation begins."""
    first, last = corpus.sequences_of(pair)
    return corpus.token_bounds((first + last) // 2, last)[0]


class PairSamples(ChatSamples):
    """The pairs of conversations of one range of a corpus, packed into rows; see `PackedSamples`."""

    packing, unit = "pairs", "pair"
    window = staticmethod(_pair_window)

    @property
    def num_pieces(self) -> int:
        """Conversations in all rows; each pair has two."""
        return len(self._first)

    def gather(self, samples: Int64s, text: Int64s, *, out_rows: Int64s | None = None, threads: int = 1) -> Gathered:
        """Fill rows with samples; see `RowSamples`."""
        rows = self.order.starts(samples)
        first = np.where(rows > 0, self._ends[rows - 1], 0)
        return replace(super().gather(samples, text, out_rows=out_rows, threads=threads), first_piece=first)


def require_chat(name: str, level: str, *, wanted: str = LEVEL) -> None:
    """Refuse a corpus that does not hold conversations, or pairs of them.

    Raises:
        UsageError: the corpus does not hold them.
    """
    if level == wanted:
        return
    option = " --chat-schema pairs" if wanted == PAIRS_LEVEL else ""
    raise UsageError(
        f"{name} does not hold {'pairs of ' if option else ''}conversations",
        found=f"a corpus of level {level}",
        expected=f'one of `mdata preprocess --chat{option}`, or kind="gpt", "document" or "packed"',
    )
