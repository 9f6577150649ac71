"""A `Progress` that stores its notes, and one that adds up amounts."""

from __future__ import annotations

from mdata.progress import Silent


class Notes(Silent):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


class Counted(Notes):
    """Keeps what was announced, and how much of it was done."""

    total: int | None = None
    done = 0

    def begin(self, label: str, total: int | None, *, unit: str, done: int = 0) -> None:
        self.total, self.done = total, done

    def advance(self, amount: int, **totals: float) -> None:
        self.done += amount
