"""A keyed permutation of [0, n), computed entry by entry: forward and inverse, nothing stored for large n.

The algorithm is in mdata_cpp/permutation.hpp (a Fisher-Yates table up to 4,096, above it a Feistel network
with cycle walking), its slow twin in tests/reference/permutation.py, the measurements in
docs/design/order.md.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mdata import _core
from mdata.util.random_keys import Key


class Permutation:
    """The permutation of [0, n) that belongs to a key; can be pickled.

    Args:
        n: entries, 1 to 2^63.
        key: from `derive_key`; only its 128 key bits are used, not its `draw`.

    Attributes:
        core: the C++ object, for calls into the core.
    """

    def __init__(self, n: int, key: Key) -> None:
        self.n = n
        self.core = _core.Permutation(n, key.low, key.high)

    def forward(self, places: ArrayLike) -> NDArray[np.int64]:
        """Integer[k] positions in [0, n) -> int64[k] values. IndexError for an entry outside."""
        return self.core.forward(np.ascontiguousarray(places, np.int64))

    def inverse(self, values: ArrayLike) -> NDArray[np.int64]:
        """Integer[k] values in [0, n) -> int64[k], their positions. IndexError for a value outside."""
        return self.core.inverse(np.ascontiguousarray(values, np.int64))


def shuffled_range(first: int, n: int, *, key: Key) -> NDArray[np.int64]:
    """[first, first + n) in the order of the permutation of [0, n) that belongs to a key, int64[n]; n is 1 or more."""
    return _core.shuffled_range(first, n, key.low, key.high)
