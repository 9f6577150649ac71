"""Vocabulary use: how many ids occur, what fraction of tokens the most frequent cover, which never occur.

Each corpus is weighted by how much of it is read, so the totals are what training sees. By default a sample of blocks
is counted, at most 2^26 tokens in all and at least 2^16 of a corpus; `mdata.reporting.token_counts` draws it. An id
that is missing from a sample may still occur; the report says when it describes a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdata.corpus.corpus import Corpus
from mdata.errors import MdataError
from mdata.reporting.token_counts import Counts, count_ids
from mdata.tokenizers.base.tokenizer import Tokenizer

SAMPLE = 1 << 26
LEAST = 1 << 16
MOST_FREQUENT = 40
_OF_A_CORPUS = 8
_UNUSED_SHOWN = 60
RANKS = tuple(mantissa * 10**power for power in range(7) for mantissa in (1, 2, 5))


@dataclass(frozen=True)
class FrequentId:
    """An id, its fraction of all tokens, and its text (None: unknown)."""

    id: int
    share: float
    text: str | None


@dataclass(frozen=True)
class VocabularyUse:
    """The use of ids in one corpus, or in all.

    Args:
        counted: number of tokens. distinct: ids that occur in them. largest: the largest of these.
        outside: tokens whose id the tokenizer does not have, or that is too large to be counted.
        coverage: (k, fraction of tokens with one of the k most frequent ids); the last k is all ids.
        frequent: the most frequent ids.
    """

    counted: int
    distinct: int
    largest: int | None
    outside: int
    coverage: tuple[tuple[int, float], ...]
    frequent: tuple[FrequentId, ...]


@dataclass(frozen=True)
class Vocabulary:
    """The use of the vocabulary in a report.

    Args:
        size: entries of the tokenizer; None: unknown. full: whether every token was counted.
        mixture: all corpora, weighted by how much is read. parts: each corpus alone.
        unused: number of ids that did not occur; unused_runs: the first of them, as (first, last, text of first).
        problem: why the texts of ids are unknown although the tokenizer is known.
    """

    size: int | None
    full: bool
    mixture: VocabularyUse
    parts: tuple[VocabularyUse, ...]
    unused: int | None
    unused_runs: tuple[tuple[int, int, str | None], ...]
    problem: str | None


def vocabulary_use(corpora: Sequence[Corpus], shares: Sequence[float], *, full: bool) -> Vocabulary:
    """Count the ids of corpora that are read in these proportions."""
    budget = None if full else max(LEAST, SAMPLE // len(corpora))
    texts, problem = _texts(corpora)
    size = next((corpus.tokenizer.vocab_size for corpus in corpora if corpus.tokenizer), None)
    counts_by_id, met = np.zeros(0), np.zeros(0, bool)
    parts, all_counted = [], True
    for corpus, share in zip(corpora, shares, strict=True):
        counts = count_ids(corpus, budget)
        all_counted = all_counted and counts.counted == sum(reader.num_tokens for reader in corpus.readers)
        parts.append(_usage(counts.ids, counts, texts=texts, size=size, most=_OF_A_CORPUS))
        counts_by_id = _padded(counts_by_id, len(counts.ids))
        counts_by_id[: len(counts.ids)] += counts.ids * (share / max(counts.counted, 1))
        met = _padded(met, len(counts.ids))
        met[: len(counts.ids)] |= counts.ids > 0
    total = Counts(met.astype(np.int64), sum(p.counted for p in parts), sum(p.outside for p in parts))
    runs, unused = _unused(met, size)
    return Vocabulary(
        size=size,
        full=all_counted,
        mixture=_usage(counts_by_id, total, texts=texts, size=None, most=MOST_FREQUENT),
        parts=tuple(parts),
        unused=unused,
        unused_runs=tuple((first, last, texts.of(first)) for first, last in runs),
        problem=problem,
    )


class _Texts:
    """The texts of ids."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._special = {id: text for text, id in tokenizer.special_ids.items()} if tokenizer else {}

    def of(self, number: int) -> str | None:
        """None where it is not known."""
        if self._tokenizer is None or number >= self._tokenizer.vocab_size:
            return None
        return self._special[number] if number in self._special else self._tokenizer.decode([number])


def _texts(corpora: Sequence[Corpus]) -> tuple[_Texts, str | None]:
    """From the first corpus whose tokenizer can be loaded; or why none could."""
    problem = None
    for corpus in corpora:
        try:
            if (tokenizer := corpus.load_tokenizer()) is not None:
                return _Texts(tokenizer), None
        except MdataError as error:  # the numbers can still be shown
            problem = problem or str(error)
    return _Texts(None), problem


def _usage(
    weights: NDArray[np.float64] | NDArray[np.int64], counts: Counts, *, texts: _Texts, size: int | None, most: int
) -> VocabularyUse:
    """The usage from `weights`, one per id; `counts` has the numbers that weights do not show."""
    used = np.flatnonzero(counts.ids)
    order = used[np.argsort(-weights[used], kind="stable")] if used.size else used
    sums = np.cumsum(weights[order])
    total = float(sums[-1]) if used.size and sums[-1] else 1.0
    ranks = [rank for rank in RANKS if rank < len(order)] + [len(order)] * bool(len(order))
    beyond = int(counts.ids[size:].sum()) if size is not None else 0
    return VocabularyUse(
        counted=counts.counted,
        distinct=len(used),
        largest=int(used[-1]) if used.size else None,
        outside=counts.outside + beyond,
        coverage=tuple((rank, float(sums[rank - 1]) / total) for rank in ranks),
        frequent=tuple(FrequentId(int(i), float(weights[i]) / total, texts.of(int(i))) for i in order[:most]),
    )


def _padded(array: NDArray[Any], length: int) -> NDArray[Any]:
    return array if len(array) >= length else np.pad(array, (0, length - len(array)))


def _unused(met: NDArray[np.bool_], size: int | None) -> tuple[list[tuple[int, int]], int | None]:
    """The first runs of ids that did not occur, and the total number of such ids."""
    if size is None:
        return [], None
    missing = np.flatnonzero(~_padded(met, size)[:size])
    cuts = np.flatnonzero(np.diff(missing) != 1) + 1
    runs = np.split(missing, cuts[:_UNUSED_SHOWN])[:_UNUSED_SHOWN] if missing.size else []
    return [(int(run[0]), int(run[-1])) for run in runs], len(missing)
