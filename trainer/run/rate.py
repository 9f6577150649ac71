"""The speed of a run: tokens per second, and the share of time spent waiting for data.

Only the time inside `with rate:` counts, that is, a step without the work after it: checkpoints and evaluations do not
count. Rank 0's clock is the one that is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import mdata


class Rate:
    """Tokens per second and the share of time spent waiting for data, since the last `take`.

    Time between steps does not count.
    """

    def __init__(self) -> None:
        self.tokens, self._seconds, self._waited, self._began = 0, 0.0, 0.0, 0.0

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._seconds += time.perf_counter() - self._began

    def wait_for(self, batches: Iterator[list[mdata.Batch]]) -> list[mdata.Batch]:
        """The next item, timed as waiting for data."""
        began = time.perf_counter()
        batch = next(batches)
        self._waited += time.perf_counter() - began
        return batch

    def take(self) -> tuple[float, float]:
        """(tokens per second, share of waiting); resets the counters."""
        found = (self.tokens / self._seconds, self._waited / self._seconds) if self._seconds else (0.0, 0.0)
        self.tokens, self._seconds, self._waited = 0, 0.0, 0.0
        return found
