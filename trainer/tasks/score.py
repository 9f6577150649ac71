"""The log probability of given tokens: what every evaluation stands on.

Rows are divided over the data-parallel ranks, each of them once, whatever their number; sums are fp64 and in the order
of the rows, so that neither the number of ranks nor the batch decides them. Rows of like length share a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mdata import UsageError
from mdata.progress import SILENT, Progress
from trainer.parallel.collectives import all_reduce_
from trainer.tasks.loaded_model import Model


class Span(NamedTuple):
    """Tokens of which those from `first` on are scored; each is predicted from all before it."""

    ids: Sequence[int]
    first: int


class SpanScore(NamedTuple):
    """The sum of the log probabilities of a span, and whether each of its tokens is the likeliest."""

    log_prob: float
    greedy: bool


def score_spans(
    model: Model, spans: Sequence[Span], *, batch_size: int = 8, progress: Progress = SILENT
) -> list[SpanScore]:
    """The score of each span, on all ranks.

    Raises:
        UsageError: a span is longer than the context and one token, or a batch without rows is asked for.
    """
    if batch_size < 1:
        raise UsageError(f"a batch of {batch_size} rows", expected="1 or more (--batch-size)")
    dp = model.world.groups["dp"]
    found = torch.zeros(len(spans), 2, dtype=torch.float64, device=model.world.device)
    by_length = sorted(range(len(spans)), key=lambda i: (-len(spans[i].ids), i))
    batches = [by_length[start : start + batch_size] for start in range(0, len(spans), batch_size)]
    progress.begin("score", len(spans), unit="rows")
    for number, batch in enumerate(batches):
        if number % dp.size == dp.rank:
            scores = model.score([spans[i].ids for i in batch])
            for row, i in enumerate(batch):
                first, stop = max(0, spans[i].first - 1), len(spans[i].ids) - 1
                found[i, 0] = scores.log_prob_BS[row, first:stop].double().sum()
                found[i, 1] = scores.greedy_BS[row, first:stop].all()
        progress.advance(len(batch))
    progress.end()
    return [SpanScore(log_prob, greedy > 0) for log_prob, greedy in all_reduce_(found, dp).tolist()]
