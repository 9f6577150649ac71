"""Arithmetic on sizes that are divided among ranks, for tables, plans and advice in messages.

Whole numbers only. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

_MOST_PARTS = 1 << 16
_MOST_SHOWN = 12


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is at least the value."""
    return -(-value // multiple) * multiple


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least the number, which is positive."""
    return 1 << (number - 1).bit_length()


def common_divisors(*values: int) -> list[int]:
    """Small common divisors only: there are never more ranks or heads, and sizes may be mistyped."""
    common = math.gcd(*values)
    return [d for d in range(1, min(common, _MOST_PARTS) + 1) if common % d == 0]


def listed(values: Iterable[int]) -> str:
    """The first numbers as text, for a message."""
    return ", ".join(str(value) for value in itertools.islice(values, _MOST_SHOWN))
