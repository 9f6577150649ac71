"""Tokens that two computations of one model chose: they may differ only where the choice was a tie, and rarely."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

NEAR = 1e-5  # between the two best logits, or between a draw and its boundary
MOST = 0.001  # of all tokens


@dataclass
class Ties:
    """Counts the tokens that were compared, and the ties that were chosen differently."""

    tokens: int = 0
    ties: int = 0

    def common(self, found: Sequence[int], wanted: Sequence[int], *, gap: Callable[[int], float], row: object) -> int:
        """How many first tokens of a row are the same: all of them, or those before a tie, after which texts differ.

        Args:
            gap: how near the choice of a token was to another one, by its place. row: for messages.
        """
        self.tokens += len(wanted)
        if list(found) == list(wanted):
            return len(wanted)
        pairs = zip(found, wanted, strict=False)
        place = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        assert place is not None, f"{row}: {len(found)} tokens instead of {len(wanted)}"
        assert gap(place) <= NEAR, f"{row}: token {place} is {found[place]} instead of {wanted[place]}, and no tie"
        self.ties += 1
        return place

    def check(self) -> None:
        """Fail if ties are too many to be by chance."""
        assert self.ties <= MOST * self.tokens, f"{self.ties} ties among {self.tokens} tokens"
