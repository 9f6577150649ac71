"""Slow twin of mdata/reporting/token_counts.py: documents by length and ids, one document and one token at a time.

For tests. It reads through `Corpus.document`, without blocks or sampling, and counts every token.
"""

from __future__ import annotations

from collections import Counter

from mdata.corpus.corpus import Corpus


def document_lengths(corpus: Corpus) -> tuple[list[int], list[int]]:
    """(documents, tokens) of each class: 0 without tokens, k of 2^(k-1) to 2^k - 1 tokens."""
    lengths = [len(corpus.document(number)) for number in range(corpus.num_documents)]
    classes = range(max((length.bit_length() + 1 for length in lengths), default=0))
    documents = [sum(length.bit_length() == k for length in lengths) for k in classes]
    tokens = [sum(length for length in lengths if length.bit_length() == k) for k in classes]
    return documents, tokens


def count_ids(corpus: Corpus) -> Counter[int]:
    """How often each id occurs."""
    counts: Counter[int] = Counter()
    for number in range(corpus.num_documents):
        counts.update(corpus.document(number).tolist())
    return counts


def coverage(counts: Counter[int], most: int) -> float:
    """The fraction of all tokens with one of the `most` most frequent ids."""
    return sum(count for _, count in counts.most_common(most)) / sum(counts.values())
