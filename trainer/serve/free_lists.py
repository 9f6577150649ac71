"""Keeps the memory of a process that serves for weeks from growing by CPython's free lists.

CPython keeps up to 2,000 freed tuples of each length below 20 for their next use, 4 MB in all, and more kinds of
objects. `tuple(generator)` adds one each time, since it takes its memory from another list. Only a full collection
gives them back, and it waits until a quarter as many objects are new as the process has: with PyTorch imported, that
never happens. So objects that exist once the model is loaded are left out of collections, which then take about 1 ms,
and there is one every EVERY requests.
"""

from __future__ import annotations

import gc

EVERY = 100  # requests


def freeze_loaded() -> None:
    """Leave all present objects out of collections."""
    gc.collect()
    gc.freeze()


class FreeLists:
    """Empties the free lists every EVERY requests."""

    def __init__(self) -> None:
        self._requests = 0

    def count(self, requests: int) -> None:
        """Count this many requests."""
        self._requests += requests
        if self._requests >= EVERY:
            self._requests = 0
            gc.collect()
