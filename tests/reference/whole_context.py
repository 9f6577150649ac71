"""The slow twin of the decode engine: the whole context is computed anew for every token, one row at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.tasks.sampling import Sampling, biased, choose, filtered, penalized, top_p_at, uniform


class Row(NamedTuple):
    """New tokens, their log probabilities, and of the place of a token how near its choice was to another one."""

    tokens: list[int]
    log_probs: list[float]
    gap: Callable[[int], float]


def continue_row(
    model: Any, prompt: Sequence[int], rules: Sampling, *, max_tokens: int, number: int = 0, sample: int = 0
) -> Row:
    """The tokens that follow a prompt."""
    new, log_probs, choices = list[int](), list[float](), list[tuple[Tensor, float]]()
    while len(new) < max_tokens and not (new and new[-1] in model.ends and not rules.ignore_eod):
        context = [*prompt, *new][-model.context :]
        logits_V = biased(model.logits(context)[-1], rules, last=context[-1])
        left_V = penalized(logits_V, rules, prompt=prompt, new=new, ends=sorted(model.ends))
        draw = uniform(rules.seed, number, len(new), sample=sample)
        (token,) = choose(left_V[None], [rules], steps=[len(new)], uniforms=[draw]).tolist()
        choices.append((left_V, draw))
        new.append(token)
        log_probs.append(float(logits_V.log_softmax(-1)[token]))
    return Row(new, log_probs, lambda place: choice_gap(*choices[place], rules=rules, step=place))


def choice_gap(logits_V: Tensor, draw: float, *, rules: Sampling, step: int) -> float:
    """Between the two best logits, or between a draw and the nearest boundary of a token."""
    if rules.is_greedy:
        best, second = logits_V.topk(2).values.tolist()
        return float(best - second)
    probability_BV, _, size_B = filtered(
        logits_V[None],
        temperature_B=torch.tensor([rules.temperature]),
        top_k_B=torch.tensor([rules.top_k]),
        top_p_B=torch.tensor([top_p_at(rules, step)], dtype=torch.float64),
        min_p_B=torch.tensor([rules.min_p]),
    )
    bounds = probability_BV[0, : int(size_B)].cumsum(-1)
    return float((bounds / bounds[-1] - draw).abs().min())
