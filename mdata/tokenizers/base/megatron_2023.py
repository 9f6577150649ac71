"""The option `compat`: the ids of an older Megatron-LM where they differ from today's.

There is one value: the fork of 2023. What it changes is each type's own matter; types that the fork did not have do
not know the option.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mdata.errors import UsageError

FORK = "megatron-2023"


def wants_fork(options: Mapping[str, Any]) -> bool:
    """Whether the fork's ids are asked for.

    Raises:
        UsageError: another value.
    """
    value = options.get("compat")
    if value not in (None, FORK):
        raise UsageError(f"compat={value!r}", expected=FORK)
    return value == FORK
