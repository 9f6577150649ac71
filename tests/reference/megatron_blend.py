"""Twin of mdata_cpp/megatron_blend.hpp and of the sums of megatron_blend.py: every component is examined each time.

Python's floats are IEEE doubles and its products are rounded before anything is subtracted from them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def weighted(weights: Sequence[float], num_samples: int) -> tuple[list[int], list[int]]:
    """Return (component, sample inside it) of each sample; weights as given."""
    return _fill(weights, [num_samples] * len(weights), num_samples)


def exhaustive(sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return (component, sample inside it) of each sample; each component gives all of its samples."""
    total = sum(sizes)
    return _fill([size / total for size in sizes], sizes, total)


def _fill(weights: Sequence[float], limits: Sequence[int], num_samples: int) -> tuple[list[int], list[int]]:
    counts = [0] * len(weights)
    components, samples = [], []
    for t in range(num_samples):
        errors = [
            (weight * float(max(t, 1)) - float(count), -i)
            for i, (weight, count, limit) in enumerate(zip(weights, counts, limits, strict=True))
            if count < limit
        ]
        best = -max(errors)[1]
        components.append(best)
        samples.append(counts[best])
        counts[best] += 1
    return components, samples


def pairwise_sum(numbers: Sequence[float]) -> float:
    """Return numpy's sum of doubles."""
    if len(numbers) > 128:
        half = len(numbers) // 2 // 8 * 8
        return pairwise_sum(numbers[:half]) + pairwise_sum(numbers[half:])
    if len(numbers) < 8:
        total = 0.0
        for number in numbers:
            total += number
        return total
    whole = len(numbers) // 8 * 8
    r = list(numbers[:8])
    for i in range(8, whole):
        r[i % 8] += numbers[i]
    total = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]))
    for number in numbers[whole:]:
        total += number
    return total


def requests(weights: Sequence[float], num_samples: int, *, surplus: float) -> tuple[list[float], list[int], list[int]]:
    """Return normalised weights, samples of each component, and how many each is built for."""
    total = pairwise_sum([float(weight) for weight in weights])
    shares = [float(weight) / total for weight in weights]
    targets = [math.ceil(num_samples * share) for share in shares]
    return shares, targets, [math.ceil(target * (1 + surplus)) for target in targets]
