"""The fast counts of lengths and ids equal counts one by one, over shards and in any order on disk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.corpus.corpus import open_corpus
from mdata.reporting.token_counts import BLOCK, LARGEST, count_ids, count_lengths
from tests.helpers.corpora import write_pair
from tests.helpers.examples import examples
from tests.helpers.manifests import corpus_of_pairs
from tests.reference import report_counts as slow

LENGTHS = st.lists(st.lists(st.integers(0, 40), max_size=4), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("counts")


@examples(60)
@given(shards=st.lists(LENGTHS, min_size=1, max_size=3), data=st.data())
def test_counts_are_those_of_the_twin(folder, shards, data):
    for number, documents in enumerate(shards):
        count = sum(map(sum, documents))
        ids = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
        write_pair(folder / f"s{number}", documents, tokens=np.array(ids, np.int64))
    corpus_of_pairs(folder / "all.json", [f"s{number}" for number in range(len(shards))])
    corpus = open_corpus(folder / "all.json")
    lengths = count_lengths(corpus)
    documents, tokens = slow.document_lengths(corpus)
    assert (lengths.documents, lengths.tokens) == (documents, tokens)
    counts = count_ids(corpus, None)
    assert {i: int(n) for i, n in enumerate(counts.ids) if n} == dict(slow.count_ids(corpus))
    assert (counts.counted, counts.outside) == (corpus.num_tokens, 0)


def test_more_blocks_than_fit_at_once(tmp_path):
    count = 70 * BLOCK + 5
    tokens = np.random.default_rng(3).integers(0, 300, count)
    write_pair(tmp_path / "x", [[count]], tokens=tokens, code=8)
    counts = count_ids(open_corpus(tmp_path / "x"), None)
    assert np.array_equal(counts.ids, np.bincount(tokens))
    assert counts.counted == count


def test_a_sample_is_of_whole_blocks_and_the_same_again(tmp_path):
    count = 40 * BLOCK
    write_pair(tmp_path / "x", [[count]], tokens=np.repeat(np.arange(40), BLOCK), code=8)
    corpus = open_corpus(tmp_path / "x")
    counts = count_ids(corpus, 5 * BLOCK - 7)
    assert counts.counted == 5 * BLOCK == counts.ids.sum()
    assert set(counts.ids.tolist()) == {0, BLOCK}, "a block was read twice, or in part"
    assert np.flatnonzero(counts.ids).tolist() != list(range(5)), "not drawn, but the first ones"
    assert np.array_equal(counts.ids, count_ids(corpus, 5 * BLOCK).ids)


def test_ids_that_no_vocabulary_has_are_counted_together(tmp_path):
    write_pair(tmp_path / "x", [[5]], tokens=np.array([1, -1, LARGEST, LARGEST - 1, 2**31 - 1]))
    counts = count_ids(open_corpus(tmp_path / "x"), None)
    assert (np.flatnonzero(counts.ids).tolist(), counts.outside, counts.counted) == ([1, LARGEST - 1], 3, 5)


def test_nothing_to_count(tmp_path):
    write_pair(tmp_path / "x", [[], [0]])
    corpus = open_corpus(tmp_path / "x")
    assert count_lengths(corpus).documents == [2]
    assert len(count_ids(corpus, 100).ids) == 0
