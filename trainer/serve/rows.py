"""The rows of a client's request: tokens come from the ranks, pieces of text go to the client.

A row ends at an end-of-text token, at a stop string or after its number of tokens. The ranks know nothing of stop
strings: a row that ends at one is cancelled there, and what they computed meanwhile is dropped.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mdata import Tokenizer
from mdata.errors import counted
from trainer.serve.errors import ApiError
from trainer.serve.rank import Found
from trainer.serve.service import OpenRequest, Service
from trainer.tasks.engine import Request, Token
from trainer.tasks.loaded_model import Model
from trainer.tasks.sampling import Sampling
from trainer.tasks.text_stream import TextStream

LARGEST_SEED = 2**63


class TokenFact(NamedTuple):
    """A token with its log probability, None for the first of a prompt, and the likeliest at its place."""

    token: int
    log_prob: float | None
    top: list[tuple[int, float]]


class RowDelta(NamedTuple):
    """The next part of a row: text that is final, and tokens."""

    text: str
    tokens: list[TokenFact]


@dataclass(slots=True)
class OpenRow:
    """One text to continue.

    Args:
        request: to the ranks. rules: with the stop strings. ends: token ids that end it.
        most: new tokens; 0: the prompt is only scored.
        echo: the prompt with which the answer begins; None: the answer is the new text alone.

    Attributes:
        text: new text so far. tokens: new ids. finish_reason: "stop" or "length", "" while it is open.
    """

    request: Request
    rules: Sampling
    stream: TextStream
    ends: frozenset[int]
    most: int
    echo: str | None = None
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    _prompt: list[TokenFact] = field(default_factory=list)
    _begun: bool = False

    def take(self, token: Token) -> RowDelta | None:
        """The text and tokens that become final with one more token; None: none yet."""
        # lm_eval takes a token for the likeliest if its number is the largest of `top`, bit for bit.
        log_prob = dict(token.top).get(token.token, token.logprob)
        fact = TokenFact(token.token, None if math.isnan(log_prob) else log_prob, token.top)
        if token.prompt:
            self._prompt.append(fact)
            self.finish_reason = token.finish or ""
            return RowDelta(self.echo or "", self._prompt) if token.finish else None
        text, facts = ("", list[TokenFact]()) if self._begun else (self.echo or "", self._prompt)
        self._begun = True
        new = self._new_text(token)
        self.text += new
        return RowDelta(text + new, [*facts, fact])

    def _new_text(self, token: Token) -> str:
        self.tokens.append(token.token)
        early = len(self.tokens) < self.rules.min_tokens
        if token.token in self.ends and not self.rules.ignore_eod and not early:
            self.finish_reason = "stop"
            return self.stream.finish()
        new = self.stream.add(token.token, stops=not early)
        if token.finish is not None or len(self.tokens) >= self.most:
            self.finish_reason = "stop" if token.finish == "stop" else "length"
            new += self.stream.finish()
        if self.stream.stopped:
            self.finish_reason = "stop"
        return new


def tokenizer_of(model: Model) -> Tokenizer:
    """The model's tokenizer; no server starts without one."""
    assert model.tokenizer is not None, "a server has a tokenizer"
    return model.tokenizer


def make_row(
    model: Model,
    id: str,
    prompt: Sequence[int],
    rules: Sampling,
    *,
    most: int,
    number: int = 0,
    sample: int = 0,
    top: int | None = None,
    echo: str | None = None,
    ends: frozenset[int] = frozenset(),
) -> OpenRow:
    """A row, checked.

    Args:
        number: of the prompt in its request, and sample: of that prompt; the draws depend on both.
        top: see Request; None: no log probabilities.
        ends: ids that end it besides those of the model.

    Raises:
        ApiError: rules out of range, or a prompt that does not fit the model.
    """
    check_room(model, len(prompt), most)
    row_rules = replace(rules, max_tokens=max(most, 1))
    request = Request(
        id=id,
        prompt=list(prompt),
        sampling=replace(row_rules, stop=()),
        max_tokens=most,
        top_logprobs=top or 0,
        echo=most == 0 or (echo is not None and top is not None),
        number=number,
        sample=sample,
    )
    stream = TextStream(tokenizer_of(model), prompt, stop=rules.stop, keep_stop=rules.keep_stop)
    return OpenRow(request, row_rules, stream, model.ends | ends, most, echo)


def check_room(model: Model, given: int, new: int) -> None:
    """Reject what does not fit the model's context.

    Raises:
        ApiError: names both numbers.
    """
    if given == 0:
        raise ApiError(400, "the prompt has no tokens", param="prompt")
    if given + new > model.context:
        raise ApiError(
            400,
            f"the prompt has {counted(given, 'token')} and {new:,} new ones are requested; "
            f"the context of {model.name} is {counted(model.context, 'token')} in total",
            param="max_tokens" if given < model.context else "prompt",
            code="context_length_exceeded",
        )


async def pieces(service: Service, run: OpenRequest, rows: Sequence[OpenRow]) -> AsyncGenerator[tuple[int, RowDelta]]:
    """Pieces of all rows as they come, with the row's number; leaves the run at the end."""
    numbers = {row.request.id: number for number, row in enumerate(rows)}
    try:
        async for reply in run:
            assert isinstance(reply, Token), "a run of rows gets tokens"
            number = numbers[reply.id]
            piece = rows[number].take(reply)
            if rows[number].finish_reason:
                run.end(reply.id)
            if piece is not None:
                yield number, piece
    finally:
        service.leave(run)


async def beams_of(service: Service, run: OpenRequest) -> Found:
    """The result of a run that is a beam search."""
    try:
        async for reply in run:
            assert isinstance(reply, Found), "a search has one reply"
            return reply
    finally:
        service.leave(run)
    raise AssertionError("a search ends with its results")
