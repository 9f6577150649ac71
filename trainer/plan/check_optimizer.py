"""Rules between the keys of the update rule, and for the gradients that it gets.

Each problem is one line with the conflicting values and advice. Pure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from trainer.config.sections import RunConfig


def optimizer_problems(config: RunConfig) -> Iterator[str]:
    """Every problem of the update rule's settings."""
    optimizer, precision = config.optimizer, config.precision
    if precision.gradients == "params" and precision.dtype not in ("bf16", "fp16"):
        yield (
            f'precision.gradients="params" changes nothing with precision.dtype="{precision.dtype}"; '
            'choose "bf16" or "fp16", or leave precision.gradients out'
        )
    for field in dataclasses.fields(optimizer):
        value = getattr(optimizer, field.name)
        if field.name.startswith("muon_") and optimizer.name != "muon" and value != field.default:
            yield (
                f'optimizer.{field.name}={value!r} applies only to optimizer.name="muon"; '
                f"set that, or leave optimizer.{field.name} out"
            )
    moments = ("beta1", "beta2", "epsilon") if optimizer.name == "sgd" else ("momentum",)
    for name in moments:
        value = getattr(optimizer, name)
        if value != type(optimizer).__dataclass_fields__[name].default:
            serves = 'optimizer.name="adamw" and "muon"' if optimizer.name == "sgd" else 'optimizer.name="sgd"'
            yield (
                f'optimizer.{name}={value!r} applies only to {serves}, not "{optimizer.name}"; '
                f"leave optimizer.{name} out"
            )
    if optimizer.name == "muon" and optimizer.muon_coefficient_type == "quintic" and optimizer.muon_ns_steps % 5:
        yield (
            f"optimizer.muon_ns_steps={optimizer.muon_ns_steps} is not a multiple of the five polynomials of "
            'optimizer.muon_coefficient_type="quintic"; choose 5 or 10, or "simple"'
        )
