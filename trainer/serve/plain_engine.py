"""What serves rows of tokens, step by step; this one computes the whole context for every token.

Rows join and leave between steps. Every rank runs the same engine on the same arrivals and cancellations, so all of
them choose the same rows and tokens without a word to each other. Stop strings are not its business: whoever reads the
text cancels the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from mdata import UsageError
from trainer.tasks.loaded_model import Model
from trainer.tasks.sampling import Sampling, biased, choose, penalized, top_log_probs, uniform


class Request(NamedTuple):
    """A row to continue.

    Args:
        id: names it. prompt: its ids. sampling: how it goes on, without stop strings.
        max_tokens: new tokens at most, 1 or more. seed: of its draws, which are f(seed, position).
        top_logprobs: how many of the likeliest tokens are reported at each position. echo: report the prompt's tokens
            from the second on as well, before the new ones.
    """

    id: str
    prompt: list[int]
    sampling: Sampling
    max_tokens: int
    seed: int
    top_logprobs: int = 0
    echo: bool = False


class Token(NamedTuple):
    """A token of a row.

    Args:
        id: of the request. index: among the new tokens, from 0; of the prompt's, minus how far it is from the
            first new one.
        top: the likeliest tokens with their log probabilities.
        finish: "stop" or "length" with the last token of a row, "cancelled" in place of a token; otherwise None.
    """

    id: str
    index: int  # type: ignore[assignment]  # tuple.index is not used
    token: int
    logprob: float
    top: list[tuple[int, float]]
    finish: str | None = None


@dataclass(slots=True)
class _Row:
    request: Request
    rules: Sampling
    new: list[int] = field(default_factory=list)


class PlainEngine:
    """See the module.

    Args:
        max_rows: that are computed together; others wait in the order in which they came.
    """

    def __init__(self, model: Model, *, max_rows: int = 16) -> None:
        self._model, self._max_rows = model, max_rows
        self._waiting: dict[str, Request] = {}
        self._open: dict[str, _Row] = {}

    def add(self, request: Request) -> None:
        """Let a row join.

        Raises:
            UsageError: it does not fit the model.
        """
        request.sampling.check(self._model.vocab_size)
        self._model.check_ids(request.prompt)
        if not request.prompt or len(request.prompt) + request.max_tokens - 1 > self._model.context:
            raise UsageError(
                f"a row does not fit the context of {self._model.name}",
                found=f"{len(request.prompt):,} tokens of the prompt and {request.max_tokens:,} new ones",
                expected=f"at most {self._model.context:,} together",
            )
        self._waiting[request.id] = request

    def cancel(self, id: str) -> None:
        """Let a row leave; one that has ended is ignored."""
        self._waiting.pop(id, None)
        self._open.pop(id, None)

    @property
    def busy(self) -> bool:
        """Whether a step has something to do."""
        return bool(self._waiting or self._open)

    def load(self) -> Mapping[str, float]:
        """Numbers for people: rows that are computed, and that wait."""
        return {"rows_running": len(self._open), "rows_waiting": len(self._waiting)}

    def step(self) -> list[Token]:
        """The next token of each row, after the tokens of the prompts of those that join."""
        tokens = list[Token]()
        while self._waiting and len(self._open) < self._max_rows:
            request = self._waiting.pop(next(iter(self._waiting)))
            self._open[request.id] = _Row(request, replace(request.sampling, seed=request.seed))
            tokens += self._prompt(request) if request.echo else []
        for row in list(self._open.values()):
            tokens.append(self._next(row))
            if tokens[-1].finish is not None:
                del self._open[row.request.id]
        return tokens

    def _next(self, row: _Row) -> Token:
        request, rules, new, ends = row.request, row.rules, row.new, self._model.ends
        context = [*request.prompt, *new]
        logits_V = biased(self._model.logits(context)[-1], rules, last=context[-1])
        log_probs_V = logits_V.log_softmax(-1)
        allowed = [token for token in ends if token < len(logits_V)]
        logits_V = penalized(logits_V, rules, prompt=request.prompt, new=new, ends=allowed)
        draw = uniform(rules.seed, 0, len(new))
        token = int(choose(logits_V.unsqueeze(0), [rules], steps=[len(new)], uniforms=[draw]))
        new.append(token)
        ended = token in ends and not rules.ignore_eod
        finish = "stop" if ended else "length" if len(new) == request.max_tokens else None
        top = top_log_probs(log_probs_V, request.top_logprobs)
        return Token(request.id, len(new) - 1, token, float(log_probs_V[token]), top, finish)

    def _prompt(self, request: Request) -> list[Token]:
        prompt, bias = request.prompt, request.sampling.logit_bias
        if len(prompt) < 2:
            return []
        scores = self._model.score([prompt], top=request.top_logprobs, bias=bias)
        tops: list[list[tuple[int, float]]] = [[] for _ in prompt[1:]]
        if scores.top_BSN is not None:
            values, ids = (part[0].tolist() for part in scores.top_BSN)
            tops = [list(zip(i, v, strict=True)) for i, v in zip(ids, values, strict=True)]
        log_probs = scores.log_prob_BS[0].tolist()
        return [
            Token(request.id, place - len(prompt), token, log_prob, top)
            for place, (token, log_prob, top) in enumerate(zip(prompt[1:], log_probs, tops, strict=True), 1)
        ]
