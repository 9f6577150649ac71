"""Memory of arrays that is used again once nobody can see it any more.

`Buffers.empty` is np.empty; what differs is the end. The memory comes back when the last array over it is gone, whoever
held it: every view, torch tensor or memoryview keeps the array that it was made from alive, and that one keeps its
memory. So a batch that is kept never changes, and nobody has to give anything back. Why it is not left to malloc,
which gives large pieces back to the system and has the kernel make and clear them again: docs/design/loader.md.
"""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_Memory = tuple[NDArray[Any], dict[str, Any]]
"""An array that keeps memory, and its array interface."""


class Buffers:
    """Arrays of a few shapes, over memory that is used again; for any number of threads.

    Args:
        waiting: how many pieces of memory of a shape may wait; what comes back beside them is freed.
    """

    def __init__(self, waiting: int) -> None:
        # Of a deque that is full the oldest leaves, and append and pop are atomic: memory comes back in any thread.
        self._waiting: defaultdict[Any, deque[_Memory]] = defaultdict(partial(deque, maxlen=waiting))

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array that nobody else can see, of any content."""
        waiting = self._waiting[shape, dtype]
        try:
            memory, interface = waiting.pop()  # what came last may still lie in a cache
        except IndexError:
            memory = np.empty(shape, dtype)
            interface = memory.__array_interface__
        return np.asarray(_Lent(memory, interface, waiting))


class _Lent:
    """The buffer below an array that is given out; it ends when the last array over it does."""

    __slots__ = ("__array_interface__", "_memory", "_waiting")

    def __init__(self, memory: NDArray[Any], interface: dict[str, Any], waiting: deque[_Memory]) -> None:
        self.__array_interface__ = interface
        self._memory, self._waiting = memory, waiting

    def __del__(self) -> None:
        self._waiting.append((self._memory, self.__array_interface__))
