"""Rectangles of logical tensors: whether they cover a tensor, and how a large one is cut.

Pure arithmetic on (start, size) pairs; no torch. Intersections: `overlaps` in load.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # start, size


def cut(box: Rectangle, most: int) -> Iterator[Rectangle]:
    """A rectangle as consecutive ones of at most `most` elements, in row-major order; a single row may be longer.

    Cut along the first dim that has more than one index, so that each part is contiguous in memory.
    """
    start, size = box
    dim = next((d for d, n in enumerate(size) if n > 1), None)
    if dim is None:
        yield box
        return
    rows = max(1, most // math.prod(size[dim + 1 :]))
    for first in range(0, size[dim], rows):
        count = min(rows, size[dim] - first)
        yield (
            (*start[:dim], start[dim] + first, *start[dim + 1 :]),
            (*size[:dim], count, *size[dim + 1 :]),
        )


MOST_CUT = 8  # no tensor of ours or of Megatron-LM has more than four dims


def tiles_exactly(shape: Sequence[int], boxes: Sequence[Rectangle]) -> bool:
    """Whether rectangles cover every element of a tensor exactly once; False if cut along more than MOST_CUT dims.

    Args:
        shape: of the tensor, every size at least 1. boxes: each inside it and not empty.
    """
    # A box is a signed sum of the quadrants that begin at its corners, and quadrants are linearly independent. So each
    # element is covered once if the corners of all boxes add up to those of the tensor, in any number of dims.
    edges = np.array([((0,) * len(shape), shape), *boxes], dtype=np.int64)
    edges[:, 1] += edges[:, 0]
    dims = [dim for dim in range(len(shape)) if (edges[1:, :, dim] != edges[0, :, dim]).any()]  # all span the others
    if not dims:
        return len(boxes) == 1
    if len(dims) > MOST_CUT:
        return False  # a box has 2^dims corners, and shapes come from files
    corners, signs = [], []
    for ends in itertools.product((0, 1), repeat=len(dims)):
        corners.append(edges[:, ends, dims])
        signs.append(np.where(np.arange(len(edges)) == 0, -1, 1) * (-1) ** sum(ends))
    places, sign = np.concatenate(corners), np.concatenate(signs)
    order = np.lexsort(places.T)
    places, sign = places[order], sign[order]
    first = np.flatnonzero(np.concatenate([[True], (places[1:] != places[:-1]).any(axis=1)]))
    return not np.add.reduceat(sign, first).any()
