"""What a rule of the migration says: a setting of ours, or why an argument is refused.

Rules are generators of these two; who calls them decides what this version can do with a setting.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """A value for a key of ours.

    Args:
        key: section.key.
        value: what it is set to.
        flags: the arguments that decided it; given or not.
        neutral: the value that a version without this key has anyway; None: it has none.
        note: what a reader should know besides.
    """

    key: str
    value: Any
    flags: tuple[str, ...]
    neutral: Any = None
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """An argument that cannot be mapped, and why, with what comes nearest."""

    flag: str
    reason: str
