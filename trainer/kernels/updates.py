"""The update rules by name, and the tensors that each keeps beside the main weight.

They are the names in a checkpoint ("exp_avg/blocks.0..."), and how many there are decides the memory of a run, so this
imports no torch. The functions are in plain.py under the rule's name with an underscore.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MOMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "adamw": ("exp_avg", "exp_avg_sq"),
        "sgd": ("momentum_buffer",),
    }
)


def state_names(rule: str) -> tuple[str, ...]:
    """Every tensor of the optimizer's state: the main weight first, then the rule's own."""
    return ("weight", *MOMENTS[rule])
