"""The rules of sampling as pure functions of logits, independent of model, batch and device.

In this order: the bias is added to the logits of a step, and tokens that may not follow the last one are removed; log
probabilities are taken from the result. Then come the penalties of earlier tokens, temperature, top-k, top-p and min-p
(the order of transformers), and the draw. A draw is f(seed, request, sample, position) and a point of the cumulative
distribution, so no text depends on its neighbours in a batch. Sums are fp64; among equal logits the lowest id comes
first.

Shapes: B rows, V entries of the vocabulary without padding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mdata import DamageError, UsageError
from mdata.util.random_keys import derive_key

MOST_STOPS, MOST_STOP_BYTES = 64, 4096
NEARLY_ZERO = 1e-5  # a temperature below is 0; dividing by it would overflow
LARGEST = 1e4  # bias or penalty, so that fp32 logits stay finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a text is continued, and where it ends.

    Args:
        max_tokens: limit on new tokens; None: 64, or fewer if the model's context has no room for them.
        min_tokens: before this many new tokens neither the end-of-document token nor a stop string ends a text.
        greedy: always the likeliest token, as with temperature 0.
        temperature: divides the logits; 0, or less than 1e-5: greedy.
        top_k: the k likeliest tokens take part, and any equal to the last of them; 0: all.
        top_p: the fewest likeliest tokens that reach this probability take part; 1: all.
        min_p: tokens of at least this share of the likeliest token's probability take part; 0: all.
        top_p_decay: factor of top_p after each new token; 0: none. top_p_bound: its lower bound.
        repetition_penalty: divides positive logits of tokens in prompt and text and multiplies negative ones; 1: none.
        presence_penalty: taken off the logits of tokens in the text. frequency_penalty: as often as they are there.
        logit_bias: token id -> number that is added to its logit; -inf: never.
        blocked_after: last token -> ids that may not follow it.
        stop: strings of which the first to appear in the new text ends it.
        keep_stop: the text ends with the token that completed the stop string, instead of before the string.
        ignore_eod: the end-of-document token is a token like others.
        seed: of the draws.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    greedy: bool = False
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    top_p_decay: float = 0.0
    top_p_bound: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    blocked_after: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    keep_stop: bool = False
    ignore_eod: bool = False
    seed: int = 1234

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.greedy or self.temperature < NEARLY_ZERO or self.top_k == 1

    def problems(self) -> list[str]:
        """Every problem of these numbers."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        wrong = [f"{name}={value!r} is not {kind}" for name, value, kind in self._wrong_types()]
        if wrong:
            yield from wrong
            return
        most = self.max_tokens
        rules = [
            (most is None or most >= 1, f"max_tokens={most} is below 1"),
            (self.min_tokens >= 0, f"min_tokens={self.min_tokens} is below 0"),
            (most is None or self.min_tokens <= most, f"min_tokens={self.min_tokens} is above max_tokens={most}"),
            (0 <= self.temperature < math.inf, f"temperature={self.temperature} is not a number of at least 0"),
            (self.top_k >= 0, f"top_k={self.top_k} is below 0; 0 keeps all tokens"),
            (0 < self.top_p <= 1, f"top_p={self.top_p} is not in (0, 1]; 1 keeps all tokens"),
            (0 <= self.min_p <= 1, f"min_p={self.min_p} is not in [0, 1]"),
            (0 <= self.top_p_decay <= 1, f"top_p_decay={self.top_p_decay} is not in [0, 1]"),
            (0 <= self.top_p_bound <= self.top_p, f"top_p_bound={self.top_p_bound} is not in [0, top_p={self.top_p}]"),
            (
                1 / LARGEST <= self.repetition_penalty <= LARGEST,
                f"repetition_penalty={self.repetition_penalty} is not in [{1 / LARGEST:g}, {LARGEST:g}]",
            ),
            *((abs(x) <= LARGEST, f"{n}={x} is not in [-{LARGEST:g}, {LARGEST:g}]") for n, x in self._additive()),
            *(
                (abs(x) <= LARGEST or x == -math.inf, f"logit_bias of {i} is {x}, not in [-{LARGEST:g}, {LARGEST:g}]")
                for i, x in self.logit_bias.items()
            ),
            (len(self.stop) <= MOST_STOPS, f"{len(self.stop)} stop strings, at most {MOST_STOPS} are allowed"),
            (all(self.stop), "an empty stop string would end every text"),
        ]
        yield from (text for holds, text in rules if not holds)
        for text in self.stop:
            if len(text.encode(errors="replace")) > MOST_STOP_BYTES:
                yield f"a stop string of {len(text):,} characters is longer than {MOST_STOP_BYTES:,} bytes"

    def _wrong_types(self) -> Iterator[tuple[str, Any, str]]:
        for entry in dataclasses.fields(self):
            value, kind = getattr(self, entry.name), str(entry.type)
            is_integer, flag = isinstance(value, int) and not isinstance(value, bool), isinstance(value, bool)
            if kind in ("int", "int | None") and not (is_integer or (value is None and "None" in kind)):
                yield entry.name, value, "an integer"
            elif kind == "float" and not (is_integer or isinstance(value, float)):
                yield entry.name, value, "a number"
            elif kind == "bool" and not flag:
                yield entry.name, value, "true or false"
            elif entry.name == "stop" and not (isinstance(value, tuple) and all(isinstance(x, str) for x in value)):
                yield entry.name, value, "a tuple of strings"

    def _additive(self) -> tuple[tuple[str, float], ...]:
        return ("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)

    def check(self, vocab_size: int) -> None:
        """Refuse numbers that are out of range.

        Args:
            vocab_size: entries of the vocabulary without padding.

        Raises:
            UsageError: every problem at once.
        """
        problems = self.problems()
        outside = sorted(i for i in self.logit_bias if not 0 <= i < vocab_size)
        if outside:
            problems.append(
                f"logit_bias names token {outside[0]}, the vocabulary has {vocab_size} (0 to {vocab_size - 1})"
            )
        if problems:
            raise UsageError("cannot generate: " + "; ".join(problems))


def top_p_at(rules: Sampling, step: int) -> float:
    """top_p of new token number `step`, from 0 (factual nucleus sampling, Lee et al. 2022, without its resets)."""
    if rules.top_p_decay <= 0:
        return rules.top_p
    return max(rules.top_p * rules.top_p_decay**step, rules.top_p_bound)


def uniform(seed: int, request: int, position: int, *, sample: int = 0) -> float:
    """The draw in [0, 1) of one position of one sample of one request."""
    more = (sample,) if sample else ()
    return derive_key("mtrain generate v1", seed, request, position, *more).below(2**53) / 2**53


def biased(logits: Tensor, rules: Sampling, *, last: int | None) -> Tensor:
    """[..., V] logits with the bias, and without the tokens that may not follow `last`."""
    blocked = rules.blocked_after.get(last, ()) if last is not None else ()
    if not rules.logit_bias and not blocked:
        return logits
    result = logits.clone()
    for token, bias in rules.logit_bias.items():
        result[..., token] += bias
    if blocked:
        result[..., list(blocked)] = -math.inf
    return result


def penalized(
    logits_V: Tensor, rules: Sampling, *, prompt: Sequence[int], new: Sequence[int], ends: Sequence[int] = ()
) -> Tensor:
    """Logits after the penalties of earlier tokens (Keskar et al. 2019; OpenAI's two).

    Args:
        prompt, new: ids before; only those of `new` count for presence and frequency.
        ends: ids that may not be chosen before min_tokens.
    """
    result = logits_V
    if rules.repetition_penalty != 1 and (prompt or new):
        ids = torch.tensor(sorted({*prompt, *new}), device=result.device)
        scores = result[ids]
        factor = rules.repetition_penalty
        result = result.index_put((ids,), torch.where(scores < 0, scores * factor, scores / factor))
    if (rules.presence_penalty or rules.frequency_penalty) and new:
        ids, counts = torch.tensor(list(new), device=result.device).unique(return_counts=True)
        less = rules.presence_penalty + rules.frequency_penalty * counts.to(result.dtype)
        result = result.index_put((ids,), result[ids] - less)
    if ends and len(new) < rules.min_tokens and not rules.ignore_eod:
        result = result.clone()
        result[list(ends)] = -math.inf
    return result


def likeliest(logits_BV: Tensor) -> Tensor:
    """int64[B]: the token with the largest logit, the lowest id among equal ones.

    Raises:
        DamageError: a row without a number.
    """
    best_B = _likeliest(logits_BV)
    check_chosen(best_B.tolist(), logits_BV.shape[-1])
    return best_B


def _likeliest(logits_BV: Tensor) -> Tensor:
    """The same, and V for a row without a number."""
    best_B, token_B = logits_BV.max(-1)  # the first of equal ones; a row with NaN has NaN
    return torch.where(best_B > -math.inf, token_B, logits_BV.shape[-1])


def check_chosen(tokens: Iterable[int], vocab_size: int) -> None:
    """Raise an error if `choose` found a row without a number.

    Raises:
        DamageError: there is one.
    """
    if any(token >= vocab_size for token in tokens):
        raise DamageError(
            "the model's logits are not numbers",
            found="NaN, or no token that may come next",
            fix="check the weights (mtrain inspect --verify), the dtype and the bias of the request",
        )


def filtered(
    logits_BV: Tensor, *, temperature_B: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The candidates of a draw: (probabilities fp64[B, V], largest first; their tokens; number of candidates [B]).

    Every filter keeps a head of the sorted tokens, so together they keep the shortest. The probabilities are those
    before the filters. Each argument has one number for each row; see Sampling.
    """
    cooled_BV = logits_BV.double() / temperature_B.double().unsqueeze(-1)
    scaled_BV, token_BV = cooled_BV.sort(descending=True, stable=True)
    probability_BV = cooled_BV.softmax(-1).gather(-1, token_BV)
    size_B = (probability_BV > 0).sum(-1)
    last_B = (top_k_B.clamp(1, logits_BV.shape[-1]) - 1).unsqueeze(-1)
    within_k_B = (scaled_BV >= scaled_BV.gather(-1, last_B)).sum(-1)
    size_B = torch.where(top_k_B > 0, torch.minimum(size_B, within_k_B), size_B)
    cumulative_BV = probability_BV.cumsum(-1)
    # The nucleus is the shortest head that reaches top_p of what top-k left; the likeliest token is always in it.
    left_B = torch.where(top_k_B > 0, cumulative_BV.gather(-1, size_B.unsqueeze(-1) - 1).squeeze(-1), 1.0)
    nucleus_B = (cumulative_BV < (top_p_B.double() * left_B).unsqueeze(-1)).sum(-1) + 1
    size_B = torch.where(top_p_B < 1, torch.minimum(size_B, nucleus_B), size_B)
    likely_B = (probability_BV >= min_p_B.double().unsqueeze(-1) * probability_BV[..., :1]).sum(-1)
    return probability_BV, token_BV, torch.minimum(size_B, likely_B)


def drawn(probability_BV: Tensor, token_BV: Tensor, size_B: Tensor, *, uniform_B: Tensor) -> Tensor:
    """int64[B]: the tokens at the quantiles `uniform` of the result of `filtered`."""
    cumulative_BV, last_B = probability_BV.cumsum(-1), (size_B - 1).unsqueeze(-1)
    target_B = uniform_B.double().unsqueeze(-1) * cumulative_BV.gather(-1, last_B)
    place_B = torch.minimum((cumulative_BV <= target_B).sum(-1, keepdim=True), last_B)
    return token_BV.gather(-1, place_B).squeeze(-1)


def choose(logits_BV: Tensor, rules: Sequence[Sampling], *, steps: Sequence[int], uniforms: Sequence[float]) -> Tensor:
    """The next token of each row: int64[B]; V for a row without a number, see `check_chosen`.

    Args:
        logits_BV: after `biased` and `penalized`. rules: of each row. steps: new tokens that each row has.
        uniforms: the draw of each row; not used where it is greedy.
    """
    best_B = _likeliest(logits_BV)
    if all(row.is_greedy for row in rules):
        return best_B

    def on_device(values: Iterable[float], dtype: torch.dtype = torch.float64) -> Tensor:
        numbers = torch.tensor(list(values), dtype=dtype)
        # From pinned memory, so that the host does not wait for what runs on a GPU.
        pinned = numbers.pin_memory() if logits_BV.is_cuda else numbers
        return pinned.to(logits_BV.device, non_blocking=True)

    heads = filtered(
        logits_BV,
        temperature_B=on_device(1.0 if row.is_greedy else row.temperature for row in rules),
        top_k_B=on_device((row.top_k for row in rules), torch.int64),
        top_p_B=on_device(top_p_at(row, step) for row, step in zip(rules, steps, strict=True)),
        min_p_B=on_device(row.min_p for row in rules),
    )
    greedy_B = on_device((row.is_greedy for row in rules), torch.bool)
    is_bad_B = best_B == logits_BV.shape[-1]
    return torch.where(greedy_B | is_bad_B, best_B, drawn(*heads, uniform_B=on_device(uniforms)))
