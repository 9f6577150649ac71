"""The slow twin of the decode engine: the whole context is computed anew for every token, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.tasks.sampling import Sampling, biased, choose, penalized, uniform


def continue_row(
    model: Any, prompt: Sequence[int], rules: Sampling, *, max_tokens: int, number: int = 0, sample: int = 0
) -> tuple[list[int], list[float]]:
    """The tokens that follow a prompt, and their log probabilities."""
    new, log_probs = list[int](), list[float]()
    while len(new) < max_tokens and not (new and new[-1] in model.ends and not rules.ignore_eod):
        context = [*prompt, *new][-model.context :]
        logits_V = biased(model.logits(context)[-1], rules, last=context[-1])
        left_V = penalized(logits_V, rules, prompt=prompt, new=new, ends=sorted(model.ends))
        draw = uniform(rules.seed, number, len(new), sample=sample)
        (token,) = choose(left_V[None], [rules], steps=[len(new)], uniforms=[draw]).tolist()
        new.append(token)
        log_probs.append(float(logits_V.log_softmax(-1)[token]))
    return new, log_probs
