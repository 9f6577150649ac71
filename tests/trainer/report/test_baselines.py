"""Baselines against a slow twin with dictionaries, and against values computed by hand."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.examples import examples
from trainer.report import baselines


def row(ids, mask=None):
    ids = np.asarray(ids, dtype=np.int64)
    mask = np.ones(len(ids) - 1, dtype=np.float32) if mask is None else np.asarray(mask, dtype=np.float32)
    return ids[:-1], ids[1:], mask


def slow(train_rows, valid_rows, vocab_size):
    """The twin: one pair at a time, in the notation of the papers."""
    pairs = [(int(h), int(w)) for x, y, m in train_rows for h, w, k in zip(x, y, m, strict=True) if k]
    pair_count, word_count, history_count = (
        Counter(pairs),
        Counter(w for _, w in pairs),
        Counter(h for h, _ in pairs),
    )
    followers = defaultdict(set)
    for h, w in pairs:
        followers[h].add(w)

    def witten_bell_unigram(w):
        types = len(word_count)
        if not pairs:
            return 1 / vocab_size
        return (word_count[w] + types * (1 / vocab_size)) / (len(pairs) + types)

    def witten_bell(h, w):
        types = len(followers[h])
        if types == 0:
            return witten_bell_unigram(w)
        return (pair_count[h, w] + types * witten_bell_unigram(w)) / (history_count[h] + types)

    models = {
        "unigram_add_one": lambda h, w: (word_count[w] + 1) / (len(pairs) + vocab_size),
        "bigram_add_one": lambda h, w: (pair_count[h, w] + 1) / (history_count[h] + vocab_size),
        "bigram_witten_bell": witten_bell,
    }
    held = [(int(h), int(w)) for x, y, m in valid_rows for h, w, k in zip(x, y, m, strict=True) if k]
    out = {name: -sum(math.log(p(h, w)) for h, w in held) / len(held) for name, p in models.items()}
    out["unigram_entropy"] = -sum(c / len(pairs) * math.log(c / len(pairs)) for c in word_count.values())
    sums = [sum(p(h, w) for w in range(vocab_size)) for p in models.values() for h in range(vocab_size)]
    assert np.allclose(sums, 1), "every model of the twin is a distribution"
    return out


def rows_of(vocab_size):
    ids = st.lists(st.integers(0, vocab_size - 1), min_size=2, max_size=12)
    masked = ids.flatmap(
        lambda x: st.tuples(st.just(x), st.lists(st.integers(0, 1), min_size=len(x) - 1, max_size=len(x) - 1))
    )
    return st.lists(masked.map(lambda pair: row(*pair)), max_size=6)


@examples(80)
@given(st.integers(2, 6).flatmap(lambda v: st.tuples(st.just(v), rows_of(v), rows_of(v))), st.integers(1, 9))
def test_equals_the_twin(drawn, chunk):
    vocab_size, train, valid = drawn
    valid = [*valid, row([0, 1])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "_CHUNK_PAIRS", chunk)
        got = baselines.evaluate(baselines.count_pairs(train, vocab_size), valid)
    for name, value in slow(train, valid, vocab_size).items():
        assert getattr(got, name) == pytest.approx(value, rel=1e-12, abs=1e-12), name
    assert got.train_tokens == sum(int(m.sum()) for _, _, m in train)


def test_baselines_are_what_a_hand_calculates():
    counts = baselines.count_pairs([row([0, 1, 0, 1, 2])], 4)
    got = baselines.evaluate(counts, [row([0, 1])])
    assert counts.total == 4
    assert got.unigram_add_one == pytest.approx(-math.log(3 / 8))
    assert got.bigram_add_one == pytest.approx(-math.log(3 / 6))
    # c(0, 1) = 2, one follower of 0; p(1) = (2 + 3/4) / (4 + 3)
    assert got.bigram_witten_bell == pytest.approx(-math.log((2 + 2.75 / 7) / 3))
    assert got.unigram_entropy == pytest.approx(1.5 * math.log(2))


def test_a_sample_read_twice_counts_twice():
    once = baselines.count_pairs([row([0, 1, 2])], 3)
    twice = baselines.count_pairs([row([0, 1, 2])] * 2, 3)
    assert (twice.counts == 2 * once.counts).all()


def test_a_large_vocabulary_stays_sparse():
    counts = baselines.count_pairs([row([0, 199_999, 150_000, 199_999])], 200_000)
    assert len(counts.keys) == 3
    assert baselines.evaluate(counts, [row([150_000, 199_999])]).bigram_witten_bell < math.log(200_000) / 2


def test_refuses_ids_outside_the_vocabulary_and_nothing_to_evaluate():
    with pytest.raises(ValueError, match=r"span 0 to 7, outside a vocabulary of 4"):
        baselines.count_pairs([row([0, 7])], 4)
    counts = baselines.count_pairs([row([0, 1])], 4)
    with pytest.raises(ValueError, match="no unmasked validation token"):
        baselines.evaluate(counts, [row([0, 1], mask=[0])])
