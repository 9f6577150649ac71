"""How long work tells its caller how far it is, without printing anything itself.

A library function takes a `Progress` and defaults to `SILENT`. The command line passes one that draws a bar
on a terminal or writes a JSON line now and then (cli/console.py). Amounts add up; totals are shown as they
stand, so that the function which counts them keeps the only copy.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A listener of one piece of work after another."""

    def begin(self, label: str, total: int | None, *, unit: str) -> None:
        """A piece of work starts: what it is, how much there is in `unit` ("B", "steps"; None: not known)."""

    def advance(self, amount: int, **totals: float) -> None:
        """`amount` more units are done; `totals` (tokens=..., documents=..., loss=...) as they now stand."""

    def end(self) -> None:
        """The piece of work is done."""


class Silent:
    """Hears everything and says nothing."""

    def begin(self, label: str, total: int | None, *, unit: str) -> None:
        """See `Progress`."""

    def advance(self, amount: int, **totals: float) -> None:
        """See `Progress`."""

    def end(self) -> None:
        """See `Progress`."""


SILENT = Silent()
