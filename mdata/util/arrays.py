"""Arrays of int64, and indexes that run over several concatenated parts.

Documents, sequences and tokens of a corpus are numbered over its shards: number k belongs to one of them, at some
position inside it. Both are found by one bisection in the offsets of the parts; all code computes and searches offsets
here. Rows of different lengths in one flat array are described by the cumulative sums of their lengths.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


def offsets_of(counts: Iterable[int]) -> list[int]:
    """The number of entries before each part, then the total: [3, 0, 2] -> [0, 3, 3, 5]."""
    return list(accumulate(counts, initial=0))


def locate(offsets: Sequence[int], number: int) -> tuple[int, int]:
    """(part that contains an entry, position of the entry inside it).

    One past the last entry is position 0 of one past the last part.
    """
    part = bisect_right(offsets, number) - 1
    return part, number - offsets[part]


def locate_all(offsets: npt.ArrayLike, numbers: Int64s) -> tuple[Int64s, Int64s]:
    """`locate` for many entries: two int64[n]."""
    starts = np.asarray(offsets, np.int64)
    parts = np.searchsorted(starts, numbers, side="right") - 1
    return parts, numbers - starts[parts]


def running_sums(values: npt.NDArray[Any]) -> Int64s:
    """int64[n + 1]: the sums of the first k values."""
    sums = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=sums[1:])
    return sums


def ranges(first: npt.NDArray[np.integer], count: npt.NDArray[np.integer]) -> Int64s:
    """[4, 9], [2, 3] -> [4, 5, 9, 10, 11]."""
    sums = running_sums(count)
    return np.repeat(first - sums[:-1], count) + np.arange(sums[-1])
