"""Selection maps: which component gives global sample k, and which of its samples.

There are four: `NativeBlend` (shares, endless), `PhasedBlend`, `MegatronBlend` (arrays), and `Concatenation`, one
component after another, for validation and test. They work on numbers only and do not know corpora. The caller
(`Dataset.locate`) refuses numbers out of range.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from mdata.util.arrays import Int64s, locate_all, offsets_of

MOST_SAMPLES = 1 << 62  # sample numbers are below it, so the sum of two fits 64 bits


def sample_numbers(samples: ArrayLike) -> Int64s:
    """int64[n], contiguous.

    Raises:
        TypeError: not integers. IndexError: a number that does not fit 64 bits.
    """
    numbers = np.asarray(samples)
    if numbers.size and numbers.dtype.kind != "i":
        integers = numbers.dtype.kind == "u" or (
            numbers.dtype.kind == "O" and all(isinstance(number, int) for number in numbers.ravel().tolist())
        )
        if not integers:
            raise TypeError(f"sample numbers are integers, not {numbers.dtype}")
        if numbers.max() >= MOST_SAMPLES or numbers.min() <= -MOST_SAMPLES:
            raise IndexError(f"samples {numbers.min()} to {numbers.max()}; numbers are from 0 to below 2^62")
    return np.ascontiguousarray(numbers, np.int64)


def from_start(index: int, num_samples: int | None) -> int:
    """The sample number of an index, which may count from the end; `num_samples` None: endless.

    Raises:
        IndexError: a negative index that has no sample. TypeError: not an integer.
    """
    if isinstance(index, int) and index >= 0:
        return index
    if not isinstance(index, Integral):
        raise TypeError(f"sample numbers are integers, not {index!r}")
    if index >= 0:
        return index
    if num_samples is None:
        raise IndexError(f"sample {index}: this dataset has no end to count from; set num_samples for one")
    if index < -num_samples:
        raise IndexError(f"sample {index} of {num_samples}")
    return index + num_samples


def chosen(samples: slice, num_samples: int | None) -> range:
    """The sample numbers of a slice, as in a list of that length; `num_samples` None: endless.

    Raises:
        IndexError: a negative bound of an endless dataset. TypeError: a slice without a stop.
    """
    if num_samples is not None:
        return range(num_samples)[samples]
    for place in (samples.start, samples.stop):
        if place is not None:
            from_start(place, None)
    if samples.stop is None or (samples.step or 1) < 0:
        raise TypeError("a slice without a stop, but the dataset has no end: give a stop, or set num_samples")
    return range(MOST_SAMPLES)[samples]


class SelectionMap(Protocol):
    """Global sample number <-> (component, sample inside it)."""

    @property
    def num_samples(self) -> int | None:
        """Number of samples; None if endless."""

    def locate(self, samples: ArrayLike) -> tuple[Int64s, Int64s]:
        """Integer[k] global samples -> (component, sample inside the component), int64[k] each."""

    def inverse(self, components: ArrayLike, samples: ArrayLike) -> Int64s:
        """Integer[k] components and integer[k] of their samples -> int64[k] global samples."""

    def counts(self, num_samples: int) -> tuple[int, ...]:
        """How many of the first `num_samples` global samples each component gives."""


class Concatenation:
    """One component after another, each once; can be pickled."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self._offsets = np.array(offsets_of(self.sizes), np.int64)

    @property
    def num_samples(self) -> int:
        """Sum of the sizes."""
        return int(self._offsets[-1])

    def locate(self, samples: ArrayLike) -> tuple[Int64s, Int64s]:
        """See `SelectionMap`."""
        numbers = np.ascontiguousarray(samples, np.int64)
        return locate_all(self._offsets, numbers)

    def inverse(self, components: ArrayLike, samples: ArrayLike) -> Int64s:
        """See `SelectionMap`."""
        return self._offsets[np.ascontiguousarray(components, np.int64)] + np.ascontiguousarray(samples, np.int64)

    def counts(self, num_samples: int) -> tuple[int, ...]:
        """See `SelectionMap`."""
        counts = np.clip(num_samples - self._offsets[:-1], 0, np.array(self.sizes, np.int64))
        return tuple(counts.tolist())
