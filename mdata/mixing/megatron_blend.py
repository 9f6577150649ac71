"""Megatron's blends, bit for bit: two arrays with the component of each sample, and which of its samples it is.

By weights (`weighted`) each component is built for `requests` samples (its share rounded up, plus 0.5 % in case the
blend takes more), and the next sample comes from the component that is furthest behind its share. By sizes alone
(`exhaustive`) every sample of every component comes once.
The algorithm is in mdata_cpp/megatron_blend.hpp, its slow twin in tests/reference/megatron_blend.py.

What differs: from 32,767 components on, numbers are wider, where the original overflows or refuses; weights that are
not positive and finite are refused by name; a component without samples is left out of an exhaustive blend (the
original writes past its arrays); a blend that takes more samples of a component than it has is refused with both
numbers (`check`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mdata import _core
from mdata.array_cache.cache import Cache
from mdata.errors import UsageError, counted
from mdata.util.arrays import Int64s, running_sums
from mdata.util.pickling import PickledByArguments

NAME = "megatron"
VERSION = 1
SURPLUS = 0.005
# Component numbers below this fit the type that Megatron uses.
_NARROW = np.iinfo(np.int16).max

CacheBeside = tuple[Cache, Path]


class MegatronBlend(PickledByArguments):
    """A blend as two arrays. Only the recipe is pickled: the arrays are built again, or found in the cache.

    Args:
        recipe: `{"weights": [...], "num_samples": n}` or `{"sizes": [...]}`: use `weighted` and `exhaustive`.
        cache: a cache, and the file beside which it stores the arrays; None: they stay in memory.

    Attributes:
        components: int16[n] (int32 from 32,767 components on), the component of each sample.
        samples: int64[n], which of the component's samples it is.
    """

    def __init__(self, recipe: Mapping[str, Any], cache: CacheBeside | None = None) -> None:
        self._recipe, self._cache = dict(recipe), cache
        self.num_components = len(recipe["weights" if "weights" in recipe else "sizes"])
        arrays = _arrays(self._recipe) if cache is None else _cached(self._recipe, *cache)
        self.components: npt.NDArray[Any] = arrays["components"]
        self.samples: Int64s = arrays["samples"]
        self._by_component: tuple[Int64s, Int64s] | None = None

    @property
    def num_samples(self) -> int:
        """Number of samples of the blend."""
        return len(self.components)

    def locate(self, samples: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        """Integer[k] global samples -> (component, sample inside the component), int64[k] each."""
        numbers = np.ascontiguousarray(samples, np.int64)
        return self.components[numbers].astype(np.int64), self.samples[numbers]

    def inverse(self, components: npt.ArrayLike, samples: npt.ArrayLike) -> Int64s:
        """Integer[k] components and integer[k] of their samples -> int64[k] global samples.

        The first call builds a table of 8 bytes per sample.

        Raises:
            IndexError: a sample that the blend never reads.
        """
        if self._by_component is None:
            # Each component's samples occur in order, so a stable sort by component lists them all.
            order = np.argsort(self.components, kind="stable").astype(np.int64)
            counts = np.bincount(self.components, minlength=self.num_components)
            self._by_component = order, running_sums(counts)
        order, starts = self._by_component
        wanted, inside = np.ascontiguousarray(components, np.int64), np.ascontiguousarray(samples, np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= self.num_components):
            raise IndexError(f"components {wanted.min()} to {wanted.max()} of {self.num_components}")
        at = starts[wanted] + inside
        if np.any(inside < 0) or np.any(at >= starts[wanted + 1]):
            raise IndexError("a sample that the blend never reads")
        global_samples: Int64s = order[at]
        return global_samples

    def counts(self, num_samples: int) -> tuple[int, ...]:
        """How many of the first `num_samples` global samples each component gives."""
        return tuple(np.bincount(self.components[:num_samples], minlength=self.num_components).tolist())

    def check(self, sizes: Sequence[int], names: Sequence[str], *, requested: Sequence[int] | None = None) -> None:
        """Refuse a blend that takes more samples of a component than it has.

        Raises:
            UsageError: names the component, and both numbers. Megatron raises an IndexError.
        """
        for taken, size, name in zip(self.counts(self.num_samples), sizes, names, strict=True):
            if taken <= size:
                continue
            built = "" if requested is None else f" (it was built for {requested[list(names).index(name)]})"
            least = math.ceil((taken / size - 1 + SURPLUS) * 1000) / 1000 if size else None
            raise UsageError(
                f"the blend takes more samples of {name} than there are",
                found=f"{counted(taken, 'sample')} taken, {size} there{built}",
                expected="shares of small components that are at least a sample each: they are rounded up, and the"
                " largest component makes up for it",
                fix=(
                    f"blend_surplus={least:g} (mdata build --blend-surplus, or data.blend_surplus of a run), "
                    if least
                    else ""
                )
                + 'fewer small components, or order "native"',
            )


def normalise(weights: Sequence[float]) -> list[float]:
    """Weights divided by their sum; doubles are added as by numpy.

    Raises:
        UsageError: no weights, or one that is not positive and finite (the original refuses 0 later, or continues).
    """
    numbers = np.array(list(weights), np.float64)
    bad = [i for i, number in enumerate(numbers.tolist()) if not 0 < number < math.inf]
    with np.errstate(over="ignore"):
        total = float(np.sum(numbers))
    if bad or not len(numbers) or not math.isfinite(total):
        where = f"weight {numbers[bad[0]]:g} of component {bad[0]}" if bad else f"{len(numbers)} weights, sum {total:g}"
        raise UsageError(
            "the weights of a blend must be finite and above 0", found=where, fix="leave out what should not be read"
        )
    return [float(share) for share in numbers / total]


def requests(
    weights: Sequence[float], num_samples: int, *, surplus: float = SURPLUS
) -> tuple[list[float], list[int], list[int]]:
    """The sizes to build: (normalised weights, samples of each component, samples with surplus).

    The blend then has as many samples as the second adds up to: `num_samples` or a few more.

    Raises:
        UsageError: as `normalise`; a negative number of samples; a surplus that is negative or not finite.
    """
    if num_samples < 0 or not 0 <= surplus < math.inf:
        raise UsageError(f"{counted(num_samples, 'sample')} with a surplus of {surplus}", expected="0 or more of both")
    shares = normalise(weights)
    targets = [math.ceil(num_samples * share) for share in shares]
    # As in Megatron, the factor is rounded before it is used: 1.005 as a double is slightly less.
    factor = 1 + surplus
    return shares, targets, [math.ceil(target * factor) for target in targets]


def weighted(weights: Sequence[float], num_samples: int, *, cache: CacheBeside | None = None) -> MegatronBlend:
    """The blend of this many samples by weights; they are normalised first, even if they already were.

    Raises:
        UsageError: as `normalise`.
    """
    return MegatronBlend({"weights": normalise(weights), "num_samples": num_samples}, cache)


def exhaustive(sizes: Sequence[int], *, cache: CacheBeside | None = None) -> MegatronBlend:
    """The blend that takes every sample of components with these sizes once."""
    if not sizes or min(sizes) < 0:
        raise UsageError("an exhaustive blend of these sizes", found=str(list(sizes)[:8]), expected="0 or more of each")
    return MegatronBlend({"sizes": [int(size) for size in sizes]}, cache)


def _arrays(recipe: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    by_weight = "weights" in recipe
    shares = recipe["weights" if by_weight else "sizes"]
    num_samples = recipe["num_samples"] if by_weight else sum(shares)
    components = np.empty(num_samples, np.int16 if len(shares) < _NARROW else np.int32)
    samples = np.empty(num_samples, np.int64)
    if by_weight:
        _core.fill_blend(np.array(shares, np.float64), components, samples)
    else:
        _core.fill_blend_once(np.array(shares, np.int64), components, samples)
    return {"components": components, "samples": samples}


def _cached(recipe: Mapping[str, Any], cache: Cache, beside: Path) -> Mapping[str, npt.NDArray[Any]]:
    exact = dict(recipe) | ({"weights": [share.hex() for share in recipe["weights"]]} if "weights" in recipe else {})
    key = {"name": "megatron-blend", "corpus": "", "algorithm": f"{NAME} {VERSION}", **exact}
    entries = recipe["num_samples"] if "weights" in recipe else sum(recipe["sizes"])
    return cache.arrays(beside, key, make=lambda: [_arrays(recipe)], entries=lambda: 2 * entries)
