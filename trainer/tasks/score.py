"""The log probability of given tokens, on which every evaluation is built.

An evaluation uses a `Scorer`: an opened `Model`, or a run that is scored while it trains (run/evaluating.py).

Rows are divided over the data-parallel ranks, each once; sums are fp64 and in the order of the rows, so that they
depend neither on the number of ranks nor on the batch. Rows of similar length share a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import mdata
from mdata import UsageError
from mdata.progress import SILENT, Progress


class ScoredSpan(NamedTuple):
    """Tokens of which those from `first` on are scored; each is predicted from all before it."""

    ids: Sequence[int]
    first: int


class SpanScore(NamedTuple):
    """The sum of the log probabilities of a span, and whether each of its tokens is the likeliest."""

    log_prob: float
    greedy: bool


class Scorer(Protocol):
    """A model with its tokenizer that scores tokens; every rank calls it with the same spans."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def context(self) -> int:
        """The longest row, in tokens."""

    @property
    def rows(self) -> int:
        """Rows of the embedding: token ids are below."""

    @property
    def tokenizer(self) -> mdata.Tokenizer | None:
        """The tokenizer; None: only ids are scored."""

    @property
    def bos(self) -> int | None:
        """The id that begins a text; None if the tokenizer has none."""

    @property
    def ends(self) -> frozenset[int]:
        """The ids that end a text."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def score_spans(
        self, spans: Sequence[ScoredSpan], *, batch_size: int = 8, greedy: bool = True, progress: Progress = SILENT
    ) -> list[SpanScore]:
        """The score of each span, on all ranks; with greedy=False only its log probability means something."""


def row_length(model: Scorer, sequence_length: int | None) -> int:
    """The tokens of a row that a user asks for; None: the model's context.

    Raises:
        UsageError: more than the context, or none.
    """
    length = model.context if sequence_length is None else sequence_length
    if not 1 <= length <= model.context:
        raise UsageError(f"--sequence-length {length} does not fit {model.name}", expected=f"1 to {model.context}")
    return length


def batches_by_length(spans: Sequence[ScoredSpan], batch_size: int) -> list[list[int]]:
    """The numbers of the spans that share a batch, the longest first."""
    by_length = sorted(range(len(spans)), key=lambda i: (-len(spans[i].ids), i))
    return [by_length[start : start + batch_size] for start in range(0, len(spans), batch_size)]
