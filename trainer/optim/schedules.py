"""Learning rate and weight decay as functions of the work done.

Pure: numbers in, numbers out; there is no stored state that could be wrong when a run continues. The shapes and their
order of precedence are Megatron's, and with `warmup_count = "before"` its numbers, too. By default a step's position in
the warmup is counted after the step, so that the first update has lr / warmup_steps and not 0, and the last one lr.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from trainer.config.sections import OptimizerSection
from trainer.plan.lengths import ScheduleLengths


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The rates of an update; the weight decay applies to parameters that have one.

    Args:
        embedding_learning_rate: of the token embedding and the output head.
    """

    learning_rate: float
    weight_decay: float
    embedding_learning_rate: float


def rates(optimizer: OptimizerSection, lengths: ScheduleLengths, *, steps: int, samples: int, batch: int) -> Rates:
    """Learning rate and weight decay of an update of `batch` samples, given the steps and samples before it."""
    before, after = lengths.span(steps=steps, samples=samples, batch=batch)
    rate = embedding_rate = learning_rate(optimizer, lengths, before=before, after=after)
    if optimizer.embedding_lr:
        own = dataclasses.replace(optimizer, lr=optimizer.embedding_lr, min_lr=optimizer.embedding_min_lr)
        embedding_rate = learning_rate(own, lengths, before=before, after=after)
    decay = weight_decay(optimizer, lengths, before=before)
    return Rates(learning_rate=rate, weight_decay=decay, embedding_learning_rate=embedding_rate)


def learning_rate(optimizer: OptimizerSection, lengths: ScheduleLengths, *, before: float, after: float) -> float:
    """The learning rate of an update.

    Args:
        before, after: the counter of `lengths` before and after the update.
    """
    warmup, decay, low, high = lengths.warmup, lengths.decay, optimizer.min_lr, optimizer.lr
    if optimizer.warmup_count == "before":
        if warmup > 0 and before <= warmup:
            return optimizer.init_lr + (high - optimizer.init_lr) * before / warmup
    elif before < warmup:
        return optimizer.init_lr + (high - optimizer.init_lr) * min(after, warmup) / warmup
    if optimizer.schedule == "constant":
        return high
    if before > decay:
        return low
    if optimizer.schedule == "inverse_sqrt":
        return max(low, high * math.sqrt(max(warmup, 1)) / math.sqrt(max(before, 1)))
    if before == decay:
        return low
    if optimizer.schedule == "wsd":
        begin = decay - lengths.wsd_decay
        share = 1.0 if before <= begin else SHAPES[optimizer.wsd_decay]((before - begin) / lengths.wsd_decay)
    else:
        share = SHAPES[optimizer.schedule]((before - warmup) / (decay - warmup))
    return low + (high - low) * share


def weight_decay(optimizer: OptimizerSection, lengths: ScheduleLengths, *, before: float) -> float:
    """The weight decay of an update; `before`: the counter of `lengths` before it."""
    start, end = optimizer.weight_decay, optimizer.weight_decay_end
    if optimizer.weight_decay_schedule == "constant":
        return start
    if before >= lengths.weight_decay:
        return end
    share = SHAPES[optimizer.weight_decay_schedule](before / lengths.weight_decay)
    return start + (end - start) * (1.0 - share)


# Remaining fraction (1 to 0) as a function of progress (0 to 1).
SHAPES: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "linear": lambda part: 1.0 - part,
        "cosine": lambda part: 0.5 * (1.0 + math.cos(math.pi * part)),  # Loshchilov and Hutter 2017
        "exponential": lambda part: 2.0 * 0.5**part - 1.0,
        "minus_sqrt": lambda part: 1.0 - math.sqrt(part),  # Haegele et al. 2024
    }
)
