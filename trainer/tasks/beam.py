"""Beam search as a pure state machine, by the rule that Megatron-LM and transformers share.

`Beams` lists the rows to compute next and takes their log probabilities; it does not know the model. The length of a
text is the number of its new tokens with the stop token, its score the sum of its log probabilities / length **
penalty. What is unusual: a finished text is returned without the stop token and without padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from mdata import UsageError

LARGEST_PENALTY = 32.0  # so that length ** penalty is a float greater than 0, for any length below 2 ** 31


@dataclass(frozen=True, slots=True)
class Beam:
    """One result: its new tokens without the stop token, its score, the sum of its log probabilities, and how it ended.

    Args:
        stopped: by the stop token; otherwise by the number of tokens.
    """

    tokens: tuple[int, ...]
    score: float
    total: float
    stopped: bool


@dataclass(slots=True)
class Finished:
    """The best finished texts of a search, at most `most`; among equal scores the earlier one stays.

    Args:
        length_penalty: exponent of the length; 0: sums are compared. early_stopping: end as soon as there are `most`.
    """

    most: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    beams: list[Beam] = field(default_factory=list)

    def add(self, tokens: tuple[int, ...], total: float, *, length: int, stopped: bool) -> None:
        """Keep a text if there is room, or if it is better than the worst, which it then replaces."""
        beam = Beam(tokens, total / length**self.length_penalty, total, stopped)
        if len(self.beams) == self.most:
            worst = min(range(self.most), key=lambda i: self.beams[i].score)
            if beam.score <= self.beams[worst].score:
                return
            del self.beams[worst]
        self.beams.append(beam)

    def is_done(self, best_total: float, *, length: int) -> bool:
        """Whether no open row can become better, given the best sum of log probabilities among those of this length."""
        if len(self.beams) < self.most:
            return False
        worst = min(beam.score for beam in self.beams)
        return self.early_stopping or worst >= best_total / length**self.length_penalty

    def ranked(self) -> list[Beam]:
        """The texts, best first."""
        return sorted(self.beams, key=lambda beam: -beam.score)


@dataclass(slots=True)
class Beams:
    """The state of one search: give `rows` to the model, and its log probabilities to `advance`, until `done`.

    Args:
        width: rows that are searched. max_tokens: new tokens at most. ends: token ids that end a text.
        early_stopping: end as soon as `width` texts have ended; "never": only when no open row can become better at any
            length (as in transformers).

    Attributes:
        rows: new tokens of each row; initially one empty row. totals: sums of log probabilities.
        parents: of each row, its place among the rows before the last step.
    """

    width: int
    max_tokens: int
    ends: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    rows: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    totals: list[float] = field(default_factory=lambda: [0.0])
    parents: list[int] = field(default_factory=list)
    done: bool = False
    finished: Finished = field(init=False)

    def __post_init__(self) -> None:
        if self.width < 1:
            raise UsageError(f"beam_width={self.width} is below 1", expected="the number of rows to search")
        if not abs(self.length_penalty) <= LARGEST_PENALTY:
            raise UsageError(
                f"length_penalty={self.length_penalty} is out of range",
                expected=f"-{LARGEST_PENALTY:g} to {LARGEST_PENALTY:g}",
            )
        if self.max_tokens < 1:
            raise UsageError(f"max_tokens={self.max_tokens} is below 1", expected="new tokens for the search")
        self.finished = Finished(self.width, self.length_penalty, self.early_stopping is True)

    def advance(self, log_probs_BV: Tensor) -> None:
        """Take the log probabilities of the token after each of `rows`: fp32[len(rows), V]."""
        assert not self.done, "the search has ended"
        step, vocabulary = len(self.rows[0]) + 1, log_probs_BV.shape[-1]
        sums_BV = log_probs_BV.double() + log_probs_BV.new_tensor(self.totals).double().unsqueeze(-1)
        # Twice as many as rows: if `width` of them stop, as many continue.
        best, places = sums_BV.flatten().sort(descending=True, stable=True)
        count = min(2 * self.width, int((best > -float("inf")).sum()))
        candidates = list(zip(best[:count].tolist(), places[:count].tolist(), strict=True))
        rows, totals, parents = list[tuple[int, ...]](), list[float](), list[int]()
        for rank, (total, place) in enumerate(candidates):
            parent, token = divmod(place, vocabulary)
            if token in self.ends:
                if rank < self.width:
                    self.finished.add(self.rows[parent], total, length=step, stopped=True)
                continue
            rows.append((*self.rows[parent], token))
            totals.append(total)
            parents.append(parent)
            if len(rows) == self.width:
                break
        longest = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_tokens if longest else step
        self.done = not rows or step == self.max_tokens or self.finished.is_done(candidates[0][0], length=length)
        self.rows, self.totals, self.parents = rows, totals, parents
        if step == self.max_tokens:
            for row, total in zip(rows, totals, strict=True):
                self.finished.add(row, total, length=step, stopped=False)

    def results(self, count: int) -> list[Beam]:
        """The best `count` texts of a search that is done, best first."""
        assert self.done, "the search goes on"
        return self.finished.ranked()[:count]
