"""How long work tells its caller how far it is, without printing anything itself.

A library function takes a `Progress` and defaults to `SILENT`. The command line passes one that draws a bar
on a terminal or writes a JSON line now and then (cli/progress.py). Amounts add up; totals and stages are
shown as they are, so that the function which counts them keeps the only copy.
"""

from __future__ import annotations


class Progress:
    """A listener of one piece of work after another. What it does not define, it ignores."""

    def begin(self, label: str, total: int | None, *, unit: str, done: int = 0) -> None:
        """A piece of work starts.

        Args:
            label: what it is.
            total: how much there is, what an earlier run did included; None: not known.
            unit: of total and amounts: "B", "steps".
            done: what an earlier run did; it is no part of the rates.
        """

    def advance(self, amount: int, **totals: float) -> None:
        """`amount` more units are done; `totals` (tokens=..., documents=...) of this run so far."""

    def stages(self, **seconds: float) -> None:
        """Where the time of this piece of work went so far, over all workers: read=..., parse=..., encode=..."""

    def note(self, text: str) -> None:
        """One line for the user: something was decided, left out, or will take longer than it seems."""

    def end(self) -> None:
        """The piece of work is done."""


class Silent(Progress):
    """Ignores everything."""


SILENT = Silent()
