"""The learning rate as a function of the step.

Pure: numbers in, numbers out; what is not stored cannot go wrong when a run continues.
"""

from __future__ import annotations

import math

from trainer.config.sections import OptimizerSection


def learning_rate(step: int, optimizer: OptimizerSection, *, steps: int) -> float:
    """The learning rate of the update that follows `step` finished ones (so the first is step 0).

    It rises linearly over warmup_steps updates, the last of which has `lr`, then falls along half a cosine
    (Loshchilov and Hutter 2017) from `lr` to `min_lr`, where it stays from decay_steps (0: `steps`) on.
    """
    decay_steps = optimizer.decay_steps or steps
    if step < optimizer.warmup_steps:
        return optimizer.lr * (step + 1) / optimizer.warmup_steps
    if step >= decay_steps:
        return optimizer.min_lr
    progress = (step - optimizer.warmup_steps) / (decay_steps - optimizer.warmup_steps)
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))
