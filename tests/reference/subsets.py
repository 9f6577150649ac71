"""Twin of mdata/rewriting/subsets.py: which documents a split or a sample has, from a list of their tokens.

Documents are numbered from 0; `sizes[d]` is the number of tokens of document d.
"""

from __future__ import annotations

from fractions import Fraction


def split_of(sizes: list[int], shares: list[Fraction]) -> list[list[int]]:
    """Return the documents of each part: those whose first token lies in the part's share of all tokens."""
    total, whole = sum(sizes), sum(shares)
    ends = [total * sum(shares[: part + 1]) / whole for part in range(len(shares) - 1)]
    parts: list[list[int]] = [[] for _ in shares]
    begins = 0
    for document, size in enumerate(sizes):
        parts[sum(1 for end in ends if end <= begins)].append(document)
        begins += size
    return parts


def sample_of(sizes: list[int], order: list[int], *, tokens: int) -> list[int]:
    """Return the documents, ascending, that come first in an order until they have this many tokens."""
    drawn: list[int] = []
    while sum(sizes[document] for document in drawn) < tokens:
        drawn.append(order[len(drawn)])
    return sorted(drawn)
