"""Twin of `swap_onwards` in mdata_cpp/mersenne.hpp: numpy's own words of MT19937, Python integers.

The other draws of that generator are numpy's own, and are compared with numpy.
"""

from __future__ import annotations

import numpy as np


def swap_onwards(values: list[int], seed: int) -> list[int]:
    """Return the values, each position in turn swapped with one at or after it; for 0, 1, 2 ...: torch.randperm."""
    swapped = list(values)
    words = np.random.RandomState(seed).randint(0, 2**32, len(values), dtype=np.uint32).tolist()
    for i in range(len(values) - 1):
        j = i + words[i] % (len(values) - i)
        swapped[i], swapped[j] = swapped[j], swapped[i]
    return swapped
