"""Two progress displays for `mdata.progress.Progress`: a bar for terminals, JSON lines for logs, both on stderr.

Both show the same: how much is done, rates, time left, and each stage's share of the time. While work runs, rates are
those of the last half minute; at its end, those of all of it. The work of an earlier run is not counted.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from typing import Any, TextIO

from mdata.progress import Progress, Silent

from .terminal import quoted, say

LINE_INTERVAL_S = 10.0
_WINDOW_S = 30.0
_SNAPSHOT_S = 0.5
_SMALLEST_SHARE = 0.005
_SHOWN_OTHERWISE = ("tokens", "step")  # totals that a bar shows as a rate, and as a count
_DEFAULT_COLUMNS = 80
_BAR_COLUMNS = 48  # width of tqdm's own parts besides the label and our parts, with a bar of 4


class ConsoleProgress(Progress):
    """A progress display that the console always closes."""

    def close(self) -> None:
        """Restore the terminal."""


class Meter:
    """The numbers of one piece of work.

    Args:
        total, done: see `Progress.begin`.
        now: the clock's seconds at the start.
    """

    def __init__(self, total: int | None, *, done: int, now: float) -> None:
        self.total, self.done, self.begun = total, done, now
        self.totals: dict[str, float] = {}
        self.stage_seconds: dict[str, float] = {}
        self._first = (now, done, 0.0)
        self._snapshots = deque([self._first])

    def advance(self, amount: int, totals: dict[str, float], *, now: float) -> None:
        """Count, and remember points from which a rate can be computed later."""
        self.done += amount
        self.totals.update(totals)
        if now - self._snapshots[-1][0] >= _SNAPSHOT_S:
            self._snapshots.append((now, self.done, self.totals.get("tokens", 0)))
        while len(self._snapshots) > 1 and now - self._snapshots[1][0] >= _WINDOW_S:
            self._snapshots.popleft()

    def rates(self, now: float, *, finished: bool = False) -> tuple[float, float]:
        """(units, tokens) per second."""
        then, done, tokens = self._first if finished else self._snapshots[0]
        seconds = now - then
        if seconds <= 0:
            return 0.0, 0.0
        return (self.done - done) / seconds, (self.totals.get("tokens", 0) - tokens) / seconds

    def seconds_left(self, now: float) -> float | None:
        """Seconds left; None if the total is unknown or nothing was done yet."""
        rate, _ = self.rates(now)
        return max(self.total - self.done, 0) / rate if self.total is not None and rate > 0 else None

    def shares(self) -> dict[str, float]:
        """Each stage's part of the time of all of them."""
        total = sum(self.stage_seconds.values())
        return {name: seconds / total for name, seconds in self.stage_seconds.items()} if total > 0 else {}


class BarProgress(ConsoleProgress):
    """A tqdm bar for each piece of work."""

    def __init__(self, stream: TextIO, *, program: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._program = program
        self._clock = clock
        self._bar: Any = None
        self._meter = Meter(None, done=0, now=clock())

    def begin(self, label: str, total: int | None, *, unit: str, done: int = 0) -> None:
        """See `Progress`."""
        from tqdm import tqdm

        self.close()
        self._meter = Meter(total, done=done, now=self._clock())
        # miniters=0: with amounts of very different size tqdm's own estimate would freeze the bar for long, and totals
        # change while no unit is done (an evaluation between two steps).
        self._bar = tqdm(
            desc=quoted(label),
            total=total,
            initial=done,
            unit=unit,
            unit_scale=unit == "B",
            file=self._stream,
            miniters=0,
            **_room(self._stream),
        )

    def advance(self, amount: int, **totals: float) -> None:
        """See `Progress`."""
        self._meter.advance(amount, totals, now=self._clock())
        self._bar.set_postfix_str(self._postfix(), refresh=False)
        self._bar.update(amount)

    def stages(self, **seconds: float) -> None:
        """See `Progress`."""
        self._meter.stage_seconds.update(seconds)

    def note(self, text: str) -> None:
        """See `Progress`."""
        if self._bar is not None:
            self._bar.clear()
        say(f"{self._program}: {text}\n", self._stream)
        if self._bar is not None:
            self._bar.refresh()

    def end(self) -> None:
        """See `Progress`."""
        if self._bar is not None:
            self._bar.set_postfix_str(self._postfix(finished=True), refresh=False)
        self.close()

    def close(self) -> None:
        """Close the open bar, if any."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _postfix(self, *, finished: bool = False) -> str:
        """As many parts as fit the terminal, the most important first."""
        meter = self._meter
        parts = []
        if "tokens" in meter.totals:
            _, tokens_per_s = meter.rates(self._clock(), finished=finished)
            parts.append(f"{_short(int(tokens_per_s))} tokens/s")
        shares = sorted(meter.shares().items(), key=lambda item: -item[1])
        parts += [f"{name} {share:.0%}" for name, share in shares if share >= _SMALLEST_SHARE]
        parts += [
            f"{name}={_short(value)}" for name, value in meter.totals.items() if value and name not in _SHOWN_OTHERWISE
        ]
        room = _columns(self._stream) - len(self._bar.desc) - _BAR_COLUMNS
        ends = accumulate(len(part) + 2 for part in parts)
        return ", ".join(part for part, end in zip(parts, ends, strict=True) if end <= room)


class LineProgress(ConsoleProgress):
    """One JSON object per line: at most one every `interval_s`, and one when a piece of work is done.

    Args:
        write: takes a line.
        program: begins the line of a note, which is plain text.
        clock: seconds, never going back.
        interval_s: seconds between lines.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        *,
        program: str,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = LINE_INTERVAL_S,
    ) -> None:
        self._write = write
        self._interval_s = interval_s
        self._program = program
        self._clock = clock
        self._facts: dict[str, Any] = {}
        self._meter = Meter(None, done=0, now=clock())
        self._last = 0.0

    def begin(self, label: str, total: int | None, *, unit: str, done: int = 0) -> None:
        """See `Progress`."""
        self._last = self._clock()
        self._meter = Meter(total, done=done, now=self._last)
        self._facts = {"doing": label, "unit": unit, "total": total}

    def advance(self, amount: int, **totals: float) -> None:
        """See `Progress`."""
        now = self._clock()
        self._meter.advance(amount, totals, now=now)
        if now - self._last >= self._interval_s:
            self._last = now
            self._say(now)

    def stages(self, **seconds: float) -> None:
        """See `Progress`."""
        self._meter.stage_seconds.update(seconds)

    def note(self, text: str) -> None:
        """See `Progress`."""
        self._write(f"{self._program}: {text}")

    def end(self) -> None:
        """See `Progress`."""
        self._say(self._clock(), finished=True)

    def _say(self, now: float, *, finished: bool = False) -> None:
        meter = self._meter
        rate, tokens_per_s = meter.rates(now, finished=finished)
        left = 0.0 if finished else meter.seconds_left(now)
        facts: dict[str, Any] = {
            **self._facts,
            "done": meter.done,
            **{name: _readable(value) for name, value in meter.totals.items()},
            "seconds": round(now - meter.begun, 1),
        }
        if self._facts["unit"] == "B":
            facts["mb_per_s"] = round(rate / 1e6, 2)
        if "tokens" in meter.totals:
            facts["tokens_per_s"] = round(tokens_per_s)
        facts["eta_s"] = None if left is None else round(left)
        if meter.stage_seconds:
            facts["stages"] = {name: round(share, 3) for name, share in meter.shares().items()}
        if finished:
            facts["finished"] = True
        self._write(json.dumps(facts))


class RankNotes(Silent):
    """Prints only notes, prefixed with the rank: for ranks that show no progress."""

    def __init__(self, listener: Progress, rank: int) -> None:
        self._listener, self._rank = listener, rank

    def note(self, text: str) -> None:
        """See `Progress`."""
        self._listener.note(f"rank {self._rank}: {text}")


def _room(stream: TextIO) -> dict[str, Any]:
    """The terminal's size for tqdm, which would show nothing on a terminal that reports no rows."""
    return {"dynamic_ncols": True} if all(_size(stream)) else {"ncols": _columns(stream), "nrows": 2}


def _columns(stream: TextIO) -> int:
    return _size(stream)[0] or _DEFAULT_COLUMNS


def _size(stream: TextIO) -> tuple[int, int]:
    """Columns and rows; 0 if unknown."""
    try:
        columns, rows = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError):
        return 0, 0
    return columns, rows


def _readable(value: float) -> float | None:
    """A value for a JSON line: integers unchanged, others with 6 digits, None for values that JSON lacks."""
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _short(value: float) -> str:
    if isinstance(value, int):
        for size, letter in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
            if value >= max(size, 10_000):
                return f"{value / size:.1f}{letter}"
        return str(value)
    return f"{value:.4g}"
