"""Chat samples in native order: whole conversations packed into rows, with loss only on trained tokens.

Rows are those of packed samples (packed.py). In a corpus of conversations (`mdata preprocess --chat`) sequences are
spans: context at 0, 2, 4 ... of a document, trained at 1, 3, 5 ...; so a label has loss if its token lies in a sequence
with an odd number and belongs to the document of its input. Conversations longer than a row are cut (every label is
still in one row), or left out. A cut may produce rows of context only. Slow twin: tests/reference/chat.py.
"""

from __future__ import annotations

import numpy as np

from mdata.errors import UsageError
from mdata.samples.packed import PackedSamples
from mdata.samples.rows import Gathered
from mdata.util.arrays import Int64s

LEVEL = "chat"


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


def require_chat(name: str, level: str) -> None:
    """Refuse a corpus that does not hold conversations.

    Raises:
        UsageError: the corpus does not hold conversations.
    """
    if level != LEVEL:
        raise UsageError(
            f"{name} does not hold conversations",
            found=f"a corpus of level {level}",
            expected='one of `mdata preprocess --chat`, or kind="gpt", "document" or "packed"',
        )
