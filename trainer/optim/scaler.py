"""The loss scale of fp16: the loss is multiplied by it, so that small gradients do not become zero.

The state of a dynamic scale is one small tensor on the device, and its next state is a pure function of it and of
whether the step's gradient overflowed, so the host waits for neither. The rules are Megatron's: an overflow uses up one
of `hysteresis`; when none is left this and every further overflow halves the scale, never below the smallest; `window`
good steps in a row double it, and only that restores the hysteresis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.config.sections import PrecisionSection

STATE_NAMES = ("scale", "good_steps", "hysteresis")  # of the state's elements, in order, and in a checkpoint
GROWTH, BACKOFF = 2.0, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleRule:
    """How a loss scale changes.

    Args:
        initial: the first scale. dynamic: whether it changes at all. smallest: lower bound of the scale.
        window: good steps in a row after which it doubles. hysteresis: overflows until it halves.
    """

    initial: float = 2.0**32
    dynamic: bool = True
    smallest: float = 1.0
    window: int = 1000
    hysteresis: int = 2

    @property
    def most_overflows(self) -> int:
        """Most consecutive overflows until the scale reaches its lower bound."""
        if not self.dynamic:
            return 0
        return self.hysteresis + max(0, math.ceil(math.log2(self.initial / self.smallest)))


def scale_rule(precision: PrecisionSection) -> ScaleRule:
    """How the loss scale of a run changes."""
    return ScaleRule(
        initial=precision.loss_scale or precision.initial_loss_scale,
        dynamic=not precision.loss_scale,
        smallest=precision.min_loss_scale,
        window=precision.loss_scale_window,
        hysteresis=precision.loss_scale_hysteresis,
    )


def initial_state(rule: ScaleRule, device: torch.device) -> Tensor:
    """fp64[3] on the device: the scale, the good steps since it last changed, the overflows left."""
    return torch.tensor([rule.initial, 0.0, float(rule.hysteresis)], dtype=torch.float64, device=device)


def next_state(state: Tensor, found_inf: Tensor, *, rule: ScaleRule) -> Tensor:
    """The state after a step; a new tensor.

    Args:
        state: fp64[3], see `initial_state`.
        found_inf: bool scalar on the same device, equal on all ranks: the step overflowed and changed nothing.
    """
    if not rule.dynamic:
        return state
    scale, good, left = state.unbind(0)
    good, left = torch.where(found_inf, 0.0, good + 1), torch.where(found_inf, left - 1, left)
    grows = ~found_inf & (good >= rule.window)
    shrunk = (scale * BACKOFF).clamp(min=rule.smallest)
    scale = torch.where(found_inf & (left <= 0), shrunk, torch.where(grows, scale * GROWTH, scale))
    return torch.stack((scale, torch.where(grows, 0.0, good), torch.where(grows, float(rule.hysteresis), left)))


class LossScaler:
    """The loss scale of a run.

    Attributes:
        state: fp64[3] on the device, see `initial_state`; the same tensor for the whole run, written in place.
    """

    def __init__(self, rule: ScaleRule, device: torch.device) -> None:
        self.rule, self.state = rule, initial_state(rule, device)

    @property
    def scale(self) -> Tensor:
        """fp64 scalar, the factor of the loss; a view, so read it before `update_`."""
        return self.state[0]

    def update_(self, found_inf: Tensor, *, counts: Tensor) -> None:
        """Update the state after a step, see `next_state`; does not wait for the device.

        Args:
            counts: bool scalar; a step that does not count changes nothing.
        """
        self.state.copy_(torch.where(counts, next_state(self.state, found_inf, rule=self.rule), self.state))

    def to_numbers(self) -> dict[str, float]:
        """The state for a checkpoint, by STATE_NAMES; waits for the device."""
        return dict(zip(STATE_NAMES, self.state.tolist(), strict=True))

    def load(self, numbers: Mapping[str, float]) -> None:
        """Continue from `to_numbers`; a constant scale keeps its configured value."""
        if self.rule.dynamic:
            self.state.copy_(torch.tensor([numbers[name] for name in STATE_NAMES], dtype=torch.float64))
