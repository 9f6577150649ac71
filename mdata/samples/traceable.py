"""From a sample back to the sequences that it reads, and from a sequence to the samples that read it.

Every kind of samples has `pieces` and `samples_of` (`Traceable`); here are the parts that kinds share. Nothing is
scanned in native order: a permutation's inverse finds the samples. Slow twin: tests/mdata/tracing/test_tracer.py goes
through all samples. Not done here: components, documents, steps and people's words (mdata/tracing/tracer.py).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple, Protocol, runtime_checkable

from mdata.corpus.corpus import Corpus
from mdata.order.native_order import StreamOrder


class Piece(NamedTuple):
    """A run of tokens of one sequence: its number in the corpus, the first token in it, the number of tokens."""

    sequence: int
    first: int
    length: int


@runtime_checkable
class Traceable(Protocol):
    """A kind of samples that can be traced."""

    def pieces(self, sample: int) -> list[Piece]:
        """What a sample reads, in the order in which it reads it; padding and pieces without tokens are left out."""

    def samples_of(self, sequence: int, *, first: int, stop: int) -> list[int]:
        """Samples in [first, stop) that read a token of a sequence, in ascending order.

        Raises:
            IndexError: the sequence is not in the part of the corpus that samples are made of.
        """


def pieces_of_runs(corpus: Corpus, runs: Iterable[tuple[int, int]], *, sequences: range) -> list[Piece]:
    """Runs of the stream, (first token, number of tokens), that lie inside of some sequences, as pieces."""
    found = []
    for first, count in runs:
        # The last that begins there or before has the token: empty ones come before it.
        place = bisect_right(sequences, first, key=lambda i: corpus.token_bounds(i, i)[0]) - 1
        while count:
            start, stop = corpus.token_bounds(sequences[place], sequences[place] + 1)
            taken = min(count, stop - first)
            if taken:
                found.append(Piece(sequences[place], first - start, taken))
            first, count, place = first + taken, count - taken, place + 1
    return found


def samples_at(order: StreamOrder, place: int, *, first: int, stop: int) -> list[int]:
    """Samples in [first, stop) of an order of single entries that have entry `place`, in ascending order."""
    epochs = range(first // order.samples_per_epoch, -(-stop // order.samples_per_epoch)) if order.shuffle else range(1)
    found = [order.sample_at(epoch, place) for epoch in epochs]
    return [sample for sample in found if sample is not None and first <= sample < stop]
