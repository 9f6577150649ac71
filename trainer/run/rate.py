"""How fast a run is: tokens per second, and how much of the time went into waiting for data.

Only what lies inside `with rate:` counts, which is a step without what follows it: checkpoints and evaluations are no
part of the speed of training. Rank 0's clock is the one that is written down.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import mdata


class Rate:
    """Tokens per second, and the share of the time that went into waiting for data, over the steps since it was last
    asked; what lies between steps does not count.
    """

    def __init__(self) -> None:
        self.tokens, self._seconds, self._waited, self._began = 0, 0.0, 0.0, 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._began

    def wait_for(self, batches: Iterator[list[mdata.Batch]]) -> list[mdata.Batch]:
        """The next of them."""
        began = time.perf_counter()
        batch = next(batches)
        self._waited += time.perf_counter() - began
        return batch

    def take(self) -> tuple[float, float]:
        """(tokens per second, share of waiting); counting starts anew."""
        found = (self.tokens / self._seconds, self._waited / self._seconds) if self._seconds else (0.0, 0.0)
        self.tokens, self._seconds, self._waited = 0, 0.0, 0.0
        return found
