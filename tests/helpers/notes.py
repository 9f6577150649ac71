"""A listener that keeps what it is told."""

from __future__ import annotations

from mdata.progress import Silent


class Notes(Silent):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)
