"""Assigns documents to rows: best-fit packing of whole documents, in windows, as arrays that are built once.

A row is one or more pieces; a piece is a run of tokens of one document. A document longer than a row is left out, or
cut into rows that share one token (the label of one row's last token is the first token of the next), so that no label
is lost. A piece of one token has nothing to predict and is left out. Windows are fixed ranges of the corpus' document
numbers, so changing the split changes rows only at its edges. The rows depend only on the lengths: not on seed or
epoch. Algorithm: mdata_cpp/packing.hpp; slow twin: tests/reference/packing.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mdata import _core
from mdata.array_cache.store import Arrays
from mdata.corpus.corpus import Corpus
from mdata.errors import UsageError
from mdata.progress import Progress
from mdata.samples.sample_options import PACKING_VERSION, Longer

WINDOW = 1 << 18
_LEAST = 2  # a token and its label
_MOST_TOKENS = 1 << 26


@dataclass(frozen=True, kw_only=True)
class PackingRule:
    """How documents are packed.

    Args:
        sequence_length: inputs of a row, S.
        extra_token: a row has one more token, the label of its last input.
        longer: documents longer than a row are cut into rows, or left out ("drop").
        window: documents that are fitted together.
    """

    sequence_length: int
    extra_token: bool = True
    longer: Longer = "cut"
    window: int = WINDOW

    def __post_init__(self) -> None:
        if not 1 <= self.sequence_length < _MOST_TOKENS:
            raise UsageError(
                "rows of this length cannot be packed",
                found=f"sequence length {self.sequence_length}",
                expected=f"1 to {_MOST_TOKENS - 1}",
            )

    @property
    def row_length(self) -> int:
        """Tokens of a row."""
        return self.sequence_length + int(self.extra_token)


def key_of(corpus: Corpus, documents: tuple[int, int], *, rule: PackingRule) -> dict[str, Any]:
    """Everything that decides the arrays."""
    return {
        "name": "packed",
        "version": PACKING_VERSION,
        "corpus": corpus.id,
        "documents": list(documents),
        **asdict(rule),
    }


def packed(corpus: Corpus, documents: tuple[int, int], *, rule: PackingRule, progress: Progress) -> Iterator[Arrays]:
    """Rows of documents [first, last), window after window.

    Yields:
        ends int64[r]: running count of pieces after each row, over all windows; first int64[p], count int32[p]: the
        tokens of each piece, by their numbers in the corpus.
    """
    first, last = documents
    progress.begin("packing", last - first, unit="documents")
    pieces = rows = 0
    for start in range(first - first % rule.window, max(last, first + 1), rule.window):
        begin, stop = max(start, first), min(start + rule.window, last)
        part = _window(corpus, begin, stop, rule=rule)
        part["ends"] += pieces
        pieces += len(part["first"])
        rows += len(part["ends"])
        yield part
        progress.advance(stop - begin, rows=rows)
    progress.end()


def _window(corpus: Corpus, begin: int, stop: int, *, rule: PackingRule) -> Arrays:
    starts, lengths = corpus.gatherer.documents(np.arange(begin, stop))
    if rule.longer == "drop":
        lengths = np.where(lengths > rule.row_length, 0, lengths)
    length, overlap = rule.row_length, int(rule.extra_token)
    # Without the extra token a row of one token is allowed; it has no loss either.
    least = min(_LEAST, length)
    ends, of, offsets, counts = _core.pack_documents(lengths, length, max(1, len(lengths)), overlap, least)
    return {"ends": ends, "first": starts[of] + offsets, "count": counts}
