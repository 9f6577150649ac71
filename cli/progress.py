"""Two listeners for `mdata.progress.Progress`: a bar for people, JSON lines for logs. Both write to stderr
only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, TextIO

from mdata.progress import Progress

LINE_INTERVAL_S = 10.0


class ConsoleProgress(Progress):
    """A listener that the console closes, whatever happened."""

    def close(self) -> None:
        """Leave the terminal in order."""


class BarProgress(ConsoleProgress):
    """A tqdm bar for each piece of work.

    Args:
        stream: the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bar: Any = None

    def begin(self, label: str, total: int | None, *, unit: str) -> None:
        """See `Progress`."""
        from tqdm import tqdm

        self.close()
        self._bar = tqdm(
            desc=label, total=total, unit=unit, unit_scale=unit == "B", file=self._stream, dynamic_ncols=True
        )

    def advance(self, amount: int, **totals: float) -> None:
        """See `Progress`."""
        if totals:
            self._bar.set_postfix({name: _short(value) for name, value in totals.items()}, refresh=False)
        self._bar.update(amount)

    def end(self) -> None:
        """See `Progress`."""
        self.close()

    def close(self) -> None:
        """Close the bar that is open, if any."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class LineProgress(ConsoleProgress):
    """One JSON object per line: at most one each 10 s, and one when a piece of work is done.

    Args:
        write: takes a line.
        clock: seconds, never going back.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._state: dict[str, Any] = {}
        self._begun = self._last = 0.0

    def begin(self, label: str, total: int | None, *, unit: str) -> None:
        """See `Progress`."""
        self._begun = self._last = self._clock()
        self._state = {"doing": label, "done": 0, "total": total, "unit": unit}

    def advance(self, amount: int, **totals: float) -> None:
        """See `Progress`."""
        self._state.update(totals)
        self._state["done"] += amount
        now = self._clock()
        if now - self._last >= LINE_INTERVAL_S:
            self._last = now
            self._say(now)

    def end(self) -> None:
        """See `Progress`."""
        self._say(self._clock(), finished=True)

    def _say(self, now: float, **more: bool) -> None:
        self._write(json.dumps({**self._state, "seconds": round(now - self._begun, 1), **more}))


def _short(value: float) -> str:
    if isinstance(value, int):
        for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
            if value >= 10 * size:
                return f"{value / size:.1f}{letter}"
        return str(value)
    return f"{value:.4g}"
