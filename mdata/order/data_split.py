"""Megatron's split string: which part of a corpus is for training, validation and test.

"969,30,1" divides a corpus of n sequences at round(n x 0.969) and round(n x 0.999), with Megatron's own float
arithmetic and rounding half to even, so that both tools cut at the same sequence. What differs: shares that are all
zero are refused (Megatron continues with NaN), and so is a negative number (Megatron drops the sign).
"""

from __future__ import annotations

import re
from functools import lru_cache, reduce
from operator import add

from mdata.errors import UsageError

SPLITS = ("train", "valid", "test")

_NUMBER = re.compile(r"[.0-9]+")
_NEGATIVE = re.compile(r"(?<![.0-9])-[.0-9]")  # a minus right after a number separates two numbers


@lru_cache(maxsize=16)
def split_edges(shares: str) -> tuple[float, float, float, float]:
    """Return the four edges between 0 and 1 of train, valid and test.

    Args:
        shares: up to three numbers with any separators; missing ones are 0.

    Raises:
        UsageError: not a number, more than three, or all zero.
    """
    try:
        values = [float(number) for number in _NUMBER.findall(shares)]
    except ValueError:
        values = []
    # Not sum(): from Python 3.12 on it compensates rounding, and the edges would depend on the interpreter.
    total = reduce(add, values, 0.0)
    if _NEGATIVE.search(shares) or not 1 <= len(values) <= len(SPLITS) or not 0 < total < float("inf"):
        raise UsageError(
            "the split string cannot be used",
            found=repr(shares),
            expected="one to three numbers, not all 0, for train, valid and test",
            fix='"969,30,1", Megatron\'s default',
        )
    train, valid, test = (value / total for value in values + [0.0] * (len(SPLITS) - len(values)))
    return 0.0, train, train + valid, train + valid + test


def parse_split(shares: str) -> tuple[float, float, float]:
    """Fractions of training, validation and test of a split string.

    Raises:
        UsageError: as `split_edges`.
    """
    start, train, valid, test = split_edges(shares)
    return train - start, valid - train, test - valid


def split_range(shares: str, split: str, *, num_sequences: int) -> tuple[int, int] | None:
    """Return the range [first, last) of sequences of one split of a corpus, or None if the split is absent.

    Args:
        shares: the split string.
        split: "train", "valid" or "test".
        num_sequences: sequences of the corpus.

    Raises:
        UsageError: as `split_edges`, or an unknown name of a split.
    """
    if split not in SPLITS:
        raise UsageError(f"there is no split {split!r}", expected=", ".join(SPLITS))
    edges = split_edges(shares)
    low, high = edges[SPLITS.index(split)], edges[SPLITS.index(split) + 1]
    if high <= low:
        return None
    return round(low * num_sequences), round(high * num_sequences)
