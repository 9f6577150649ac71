"""Arrays of int64, and numbers that count over several parts.

Documents, sequences and tokens of a corpus are counted over its shards: number k lies in one of them, at some place
inside it. Finding both is one bisection in the parts' offsets, which are counted here once and searched here alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


def offsets_of(counts: Iterable[int]) -> list[int]:
    """How many entries lie before each part, and then how many there are: [3, 0, 2] -> [0, 3, 3, 5]."""
    return list(accumulate(counts, initial=0))


def locate(offsets: Sequence[int], number: int) -> tuple[int, int]:
    """(number of the part that has an entry, place of the entry inside it).

    One past the last entry is place 0 of one past the last part.
    """
    part = bisect_right(offsets, number) - 1
    return part, number - offsets[part]


def locate_all(offsets: npt.ArrayLike, numbers: Int64s) -> tuple[Int64s, Int64s]:
    """`locate` of many numbers: int64[n] twice."""
    starts = np.asarray(offsets, np.int64)
    parts = np.searchsorted(starts, numbers, side="right") - 1
    return parts, numbers - starts[parts]
