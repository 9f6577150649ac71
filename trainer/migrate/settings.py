"""The results of a migration rule: a setting of ours, or the reason why an argument is refused.

Rules are generators of these two; the caller decides whether this version supports a setting.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A value for a key of ours.

    Args:
        key: section.key.
        value: its new value.
        flags: the arguments that decided it; given or not.
        neutral: the value that has the same effect as a missing key; None: there is none.
        note: additional information for the reader.
    """

    key: str
    value: Any
    flags: tuple[str, ...]
    neutral: Any = None
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """An argument that cannot be mapped, with the reason and the closest alternative."""

    flag: str
    reason: str


def is_count(text: str) -> bool:
    """Whether a text is a whole number that fits into 64 bits."""
    return bool(re.fullmatch("[0-9]{1,18}", text))
