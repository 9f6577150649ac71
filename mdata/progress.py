"""The interface through which long work reports progress to its caller; it prints nothing itself.

A library function takes a `Progress` and defaults to `SILENT`. The command line passes one that draws a bar on a
terminal or writes a JSON line now and then (cli/progress.py). Amounts are added up; totals and stages are displayed as
given, so the function that counts them keeps the only copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Progress:
    """Receives the progress of one piece of work after another. Methods that a subclass leaves out do nothing."""

    def begin(self, label: str, total: int | None, *, unit: str, done: int = 0) -> None:
        """A piece of work starts.

        Args:
            label: of the work.
            total: total amount, including the part of an earlier run; None: unknown.
            unit: of total and amounts: "B", "steps".
            done: amount done by an earlier run; not counted in rates.
        """

    def advance(self, amount: int, **totals: float) -> None:
        """`amount` more units are done; `totals`: (tokens=..., documents=...) of this run so far."""

    def stages(self, **seconds: float) -> None:
        """The time spent on this piece of work so far, over all workers: read=..., parse=..., encode=..."""

    def measured(self, values: Mapping[str, Any]) -> None:
        """Measurements of the work so far, for a log; a display of one line has no room for them."""

    def note(self, text: str) -> None:
        """One line for the user: a decision, something left out, or a long wait."""

    def end(self) -> None:
        """The piece of work is done."""


class Silent(Progress):
    """Ignores everything."""


SILENT = Silent()
