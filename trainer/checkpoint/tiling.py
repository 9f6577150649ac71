"""Rectangles of logical tensors: whether they cover a tensor, and how a large one is cut.

Pure arithmetic on (start, size) pairs; no torch. What parts two rectangles share is `overlaps` in load.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]  # start, size


def cut(box: Rectangle, most: int) -> Iterator[Rectangle]:
    """A rectangle as consecutive ones of at most `most` elements, in row-major order; a row of its own may be longer.

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


def tiles_exactly(shape: Sequence[int], boxes: Sequence[Rectangle]) -> bool:
    """Whether rectangles cover every element of a tensor exactly once.

    Args:
        shape: of the tensor, every size at least 1. boxes: each inside it and not empty.
    """
    if not shape:
        return len(boxes) == 1
    if sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    # Between two neighbouring edges along dim 0 the same boxes lie side by side: they tile the other dims.
    waiting = sorted(boxes, key=lambda box: -box[0][0])
    edges = sorted({0, *(start[0] for start, _ in boxes), *(start[0] + size[0] for start, size in boxes)})
    across: list[Rectangle] = []
    for edge in edges:
        before = len(across)
        across = [(start, size) for start, size in across if start[0] + size[0] > edge]
        changed = len(across) != before
        while waiting and waiting[-1][0][0] == edge:
            across.append(waiting.pop())
            changed = True
        if (
            changed
            and edge != shape[0]
            and not tiles_exactly(shape[1:], [(start[1:], size[1:]) for start, size in across])
        ):
            return False
    return True
