"""The native blend: a Huffman tree over integer weights that selects the component of each sample.

At every prefix each component is within 1.68 samples of its exact share, and exact at every multiple of the sum of
weights. Locating a sample, and its inverse, take time in the depth of the tree. There is no state: a blend's cursors
are `counts`. The algorithm is in mdata_cpp/blend.hpp, its slow twin in tests/reference/blend.py; docs/design/order.md
explains the choice.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mdata import _core

NAME = "native"
VERSION = 1  # part of every blend id: a new version changes the id


class NativeBlend:
    """Global sample number <-> (component, sample inside it); can be pickled.

    Sample numbers are at most 2^62; beyond, OverflowError.

    Args:
        weights: positive integers with a sum of at most 2^62, from `integer_weights`.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.weights = tuple(weights)
        self._tree = _core.BlendTree(list(self.weights))

    @property
    def num_samples(self) -> None:
        """None: the blend is endless."""
        return None

    def locate(self, samples: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Integer[k] global samples -> (component, sample inside the component), int64[k] each."""
        return self._tree.locate(np.ascontiguousarray(samples, np.int64))

    def inverse(self, components: ArrayLike, samples: ArrayLike) -> NDArray[np.int64]:
        """Integer[k] components and integer[k] of their samples -> int64[k] global samples."""
        return self._tree.inverse(np.ascontiguousarray(components, np.int64), np.ascontiguousarray(samples, np.int64))

    def counts(self, num_samples: int) -> tuple[int, ...]:
        """How many of the first `num_samples` global samples each component gives."""
        return tuple(self._tree.counts(num_samples))

    def __reduce__(self) -> tuple[object, ...]:
        return NativeBlend, (self.weights,)
