"""A `Progress` that stores its notes."""

from __future__ import annotations

from mdata.progress import Silent


class Notes(Silent):
    """Keeps the notes."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)
