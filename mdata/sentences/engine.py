"""What every sentence engine offers, and the slices in which all of them take a text.

A text is cut every 1,000,000 characters first, as Megatron's tool does, so a sentence over such a cut becomes two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

SLICE_CHARS = 1_000_000


class Engine(Protocol):
    """What splits; all that are taken give the same."""

    name: str

    def split_batch(self, texts: Sequence[str]) -> tuple[list[str], list[int]]:
        """See Splitter."""


def slices(text: str) -> list[str]:
    """The text in slices of 1,000,000 characters."""
    return [text[start : start + SLICE_CHARS] for start in range(0, len(text), SLICE_CHARS)]
