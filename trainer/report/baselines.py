"""How well counting alone predicts the next token: the baselines that a loss curve has to fall below.

Counts are made from exactly the (token, label) pairs that the model was trained on. The result is four numbers, in nats
per token: the entropy of the training labels, and the cross entropy of the validation labels under a unigram and a
bigram with add-one smoothing (Laplace) and under the interpolated Witten-Bell bigram.

What is unusual: pairs are kept as sorted unique keys `token * vocab_size + label`, so memory follows the
number of distinct pairs; one path serves a vocabulary of 300 and one of 200,000. No torch, no files.

Sources: I. Witten and T. Bell, "The zero-frequency problem", IEEE Trans. Information Theory 37(4), 1991,
method C; S. Chen and J. Goodman, "An empirical study of smoothing techniques for language modeling",
TR-10-98, 1998 (add-one in 2.1, the interpolated form of Witten-Bell in 2.6).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Row = tuple[np.ndarray, np.ndarray, np.ndarray]
"""tokens int[S], labels int[S], loss_mask float[S]; a pair counts where its mask is not zero."""

_CHUNK_PAIRS = 1 << 21  # pairs sorted at a time: 16 MiB of keys


@dataclass(frozen=True, kw_only=True, eq=False)
class PairCounts:
    """How often each label followed each token.

    Attributes:
        vocab_size: entries of the vocabulary, without padding.
        keys: int64[n], sorted, unique: token * vocab_size + label.
        counts: int64[n], occurrences of each key.
        label_counts: int64[V], occurrences of each label.
        token_counts: int64[V], pairs that begin with each token.
        followers: int64[V], distinct labels seen after each token.
    """

    vocab_size: int
    keys: Int64
    counts: Int64
    label_counts: Int64
    token_counts: Int64
    followers: Int64

    @property
    def total(self) -> int:
        """Number of pairs counted."""
        return int(self.counts.sum())


@dataclass(frozen=True, kw_only=True)
class Baselines:
    """Baselines in nats per token, and the numbers of tokens they are based on."""

    train_tokens: int
    valid_tokens: int
    unigram_entropy: float
    unigram_add_one: float
    bigram_add_one: float
    bigram_witten_bell: float


def count_pairs(rows: Iterable[Row], vocab_size: int) -> PairCounts:
    """Count the pairs of all rows.

    Args:
        rows: the training samples, each once for every time that it was read.
        vocab_size: entries of the vocabulary; every id must lie below it.

    Raises:
        ValueError: an id outside [0, vocab_size).
    """
    keys = np.empty(0, dtype=np.int64)
    counts = np.empty(0, dtype=np.int64)
    for tokens, labels in _chunks(rows, vocab_size):
        new_keys, new_counts = np.unique(tokens * vocab_size + labels, return_counts=True)
        keys, counts = _merge((keys, counts), (new_keys, new_counts.astype(np.int64)))
    label_counts = np.zeros(vocab_size, dtype=np.int64)
    token_counts = np.zeros(vocab_size, dtype=np.int64)
    np.add.at(label_counts, keys % vocab_size, counts)
    np.add.at(token_counts, keys // vocab_size, counts)
    followers = np.bincount(keys // vocab_size, minlength=vocab_size).astype(np.int64)
    return PairCounts(
        vocab_size=vocab_size,
        keys=keys,
        counts=counts,
        label_counts=label_counts,
        token_counts=token_counts,
        followers=followers,
    )


def entropy(counts: PairCounts) -> float:
    """Entropy in nats of the distribution of the training labels; 0 without any."""
    total = counts.total
    if total == 0:
        return 0.0
    share = counts.label_counts[counts.label_counts > 0] / total
    return float(-(share * np.log(share)).sum())


def evaluate(counts: PairCounts, rows: Iterable[Row]) -> Baselines:
    """Cross entropy of validation rows under the three models.

    Raises:
        ValueError: an id outside the vocabulary, or no unmasked token at all.
    """
    unigram = (counts.label_counts + 1.0) / (counts.total + counts.vocab_size)
    nats = np.zeros(3)
    num_tokens = 0
    for tokens, labels in _chunks(rows, counts.vocab_size):
        pair_counts = _lookup(counts, tokens, labels)
        probabilities = (
            unigram[labels],
            (pair_counts + 1.0) / (counts.token_counts[tokens] + counts.vocab_size),
            _witten_bell(counts, tokens, labels, pair_counts),
        )
        nats -= [np.log(p).sum() for p in probabilities]
        num_tokens += len(tokens)
    if num_tokens == 0:
        raise ValueError("there is no unmasked validation token to evaluate baselines on")
    means = (nats / num_tokens).tolist()
    return Baselines(
        train_tokens=counts.total,
        valid_tokens=num_tokens,
        unigram_entropy=entropy(counts),
        unigram_add_one=means[0],
        bigram_add_one=means[1],
        bigram_witten_bell=means[2],
    )


def _witten_bell(counts: PairCounts, tokens: Int64, labels: Int64, pair_counts: Int64) -> Float64:
    """p(label | token) = (c(token, label) + t(token) p(label)) / (c(token) + t(token)).

    t counts distinct followers; p(label) has the same form one order lower, above the uniform distribution.
    """
    types = int((counts.label_counts > 0).sum())
    below = (counts.label_counts + types / counts.vocab_size) / max(counts.total + types, 1)
    if types == 0:
        below = np.full(counts.vocab_size, 1.0 / counts.vocab_size)
    followers = counts.followers[tokens]
    denominator = counts.token_counts[tokens] + followers
    mixed = (pair_counts + followers * below[labels]) / np.maximum(denominator, 1)
    return np.where(denominator > 0, mixed, below[labels])


def _lookup(counts: PairCounts, tokens: Int64, labels: Int64) -> Int64:
    """Occurrences in training of each pair; 0 if it was never seen."""
    if len(counts.keys) == 0:
        return np.zeros(len(tokens), dtype=np.int64)
    wanted = tokens * counts.vocab_size + labels
    places = np.minimum(np.searchsorted(counts.keys, wanted), len(counts.keys) - 1)
    return np.where(counts.keys[places] == wanted, counts.counts[places], 0)


def _merge(left: tuple[Int64, Int64], right: tuple[Int64, Int64]) -> tuple[Int64, Int64]:
    """The sum of two sparse counts."""
    keys, places = np.unique(np.concatenate([left[0], right[0]]), return_inverse=True)
    counts = np.zeros(len(keys), dtype=np.int64)
    np.add.at(counts, places, np.concatenate([left[1], right[1]]))
    return keys, counts


def _chunks(rows: Iterable[Row], vocab_size: int) -> Iterator[tuple[Int64, Int64]]:
    """Unmasked (tokens, labels), many rows at a time, checked against the vocabulary."""
    held: list[tuple[np.ndarray, np.ndarray]] = []
    size = 0
    for tokens, labels, mask in rows:
        unmasked = np.asarray(mask) != 0
        held.append((np.asarray(tokens)[unmasked], np.asarray(labels)[unmasked]))
        size += len(held[-1][0])
        if size >= _CHUNK_PAIRS:
            yield _joined(held, vocab_size)
            held, size = [], 0
    if size:
        yield _joined(held, vocab_size)


def _joined(held: list[tuple[np.ndarray, np.ndarray]], vocab_size: int) -> tuple[Int64, Int64]:
    """The pending rows as two flat arrays."""
    tokens = np.concatenate([x for x, _ in held]).astype(np.int64)
    labels = np.concatenate([y for _, y in held]).astype(np.int64)
    low = min(int(tokens.min()), int(labels.min()))
    high = max(int(tokens.max()), int(labels.max()))
    if low < 0 or high >= vocab_size:
        raise ValueError(f"token ids span {low} to {high}, outside a vocabulary of {vocab_size}")
    return tokens, labels
