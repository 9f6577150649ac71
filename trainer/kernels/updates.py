"""The update rules by name, the parameters of each, and the tensors that each keeps beside the main weight.

The tensor names are those in a checkpoint ("exp_avg/blocks.0..."), and their number decides the memory of a run, so
this imports no torch. The functions are in plain.py under the rule's name with an underscore.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MOMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "adamw": ("exp_avg", "exp_avg_sq"),
        "sgd": ("momentum_buffer",),
        "muon": ("momentum_buffer",),
    }
)


def rule_of(name: str, *, matrix: bool) -> str:
    """The rule that updates a parameter: "muon" applies to matrices of blocks only, all others use AdamW.

    Args:
        name: optimizer.name. matrix: whether the parameter is a matrix of a block.
    """
    return "adamw" if name == "muon" and not matrix else name


def state_names(name: str, *, matrix: bool) -> tuple[str, ...]:
    """Every tensor of a parameter's state: the main weight first, then the rule's own."""
    return ("weight", *MOMENTS[rule_of(name, matrix=matrix)])
