"""The text of rows: several shards, sequences that are not contiguous, and corpora without sentences."""

from __future__ import annotations

import struct
from itertools import pairwise

import numpy as np
import pytest

from mdata import UsageError, open_corpus
from mdata.corpus.corpus import Corpus
from mdata.indexed.reader import IndexedReader
from mdata.samples.bert import BertSamples
from mdata.samples.masked import SentenceOrder, SentenceText
from mdata.samples.sample_options import Bert
from tests.helpers.corpora import write_pair
from tests.mdata.samples.test_masked import make_vocabulary

DOCUMENTS = [[(5 * d + s) % 7 + 1 for s in range(d % 5)] for d in range(30)]
SIZES = [size for document in DOCUMENTS for size in document]
TOKENS = np.arange(sum(SIZES)) * 31 % 59


def digest(corpus) -> dict:
    samples = BertSamples(
        corpus,
        (0, corpus.num_documents),
        options=Bert(vocabulary=make_vocabulary()),
        sequence_length=24,
        order=SentenceOrder(name="megatron", num_samples=40),
    )
    return {name: array.tolist() for name, array in samples.read(range(40)).items()}


@pytest.fixture
def whole(tmp_path):
    write_pair(tmp_path / "x_text_sentence", DOCUMENTS, tokens=TOKENS)
    return open_corpus(tmp_path / "x_text_sentence")


@pytest.mark.parametrize("cuts", [(0, 11, 30), (0, 1, 2, 2, 29, 30)])
def test_shards_make_no_difference(tmp_path, whole, cuts):
    readers, token = [], 0
    for first, stop in pairwise(cuts):
        part = DOCUMENTS[first:stop]
        size = sum(map(sum, part))
        prefix = tmp_path / f"{first}_{stop}"
        write_pair(prefix, part, tokens=TOKENS[token : token + size])
        readers.append(IndexedReader(prefix))
        token += size
    corpus = Corpus(tmp_path / "x_text_sentence", whole.manifest, readers=readers)
    text, one = SentenceText(corpus), SentenceText(whole)
    assert text.sizes().tolist() == one.sizes().tolist() == SIZES
    for first, stop in ((0, 30), (0, 1), (5, 20), (30, 30)):
        assert text.boundaries(first, stop).tolist() == one.boundaries(first, stop).tolist()
    assert digest(corpus) == digest(whole)


def test_sequences_may_lie_in_any_order(tmp_path, whole):
    """Pointers that go backwards through .bin."""
    starts = np.cumsum([0, *SIZES])[:-1]
    backwards = sum(SIZES) - starts - np.array(SIZES)
    tokens = np.empty_like(TOKENS)
    for start, place, size in zip(starts, backwards, SIZES, strict=True):
        tokens[place : place + size] = TOKENS[start : start + size]
    prefix = tmp_path / "y_text_sentence"
    boundaries = np.cumsum([0, *map(len, DOCUMENTS)])
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, len(SIZES), len(boundaries))
    tables = [np.array(SIZES, "<i4"), (backwards * 4).astype("<i8"), boundaries.astype("<i8")]
    (tmp_path / "y_text_sentence.idx").write_bytes(head + b"".join(table.tobytes() for table in tables))
    (tmp_path / "y_text_sentence.bin").write_bytes(tokens.astype("<i4").tobytes())
    corpus = open_corpus(prefix)
    assert not corpus.contiguous
    assert digest(corpus) == digest(whole)


def test_a_corpus_of_whole_documents_is_refused(tmp_path):
    write_pair(tmp_path / "x_text_document", [[5], [], [7]])
    with pytest.raises(UsageError, match=r"x is not divided into sentences(.|\n)*--split-sentences"):
        SentenceText(open_corpus(tmp_path / "x_text_document"))
    write_pair(tmp_path / "y_text_document", [[5], [3, 2], []])
    assert SentenceText(open_corpus(tmp_path / "y_text_document")).sizes().tolist() == [5, 3, 2]


def test_ids_outside_of_the_vocabulary_are_refused(whole, monkeypatch):
    monkeypatch.setattr(Corpus, "largest_id", 60)
    with pytest.raises(UsageError, match=r"not in the vocabulary(.|\n)*at most 59"):
        digest(whole)


def test_a_pair_can_be_read_without_a_map(tmp_path, whole):
    reader = IndexedReader(tmp_path / "x_text_sentence", mode="pread")
    assert digest(Corpus(tmp_path / "x_text_sentence", whole.manifest, readers=[reader])) == digest(whole)
