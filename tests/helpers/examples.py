"""How many examples a property test draws, and which parameters of a test run in `make soak` only.

`@examples(n)` draws a quarter of n, and in `make soak` n times the factor that it sets as MDATA_SOAK (default 1).
There is no deadline: test machines are shared, and a slow example is not a bug.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

SOAK = int(os.environ.get("MDATA_SOAK", "1"))


def scaled(count: int) -> int:
    """How many examples of a test are drawn: a quarter of `count`, or in `make soak` MDATA_SOAK times as many."""
    return count * SOAK if SOAK > 1 else max(count // 4, min(count, 5))


def examples(count: int) -> settings:
    """Decorator for a @given test: `scaled(count)` examples."""
    return settings(max_examples=scaled(count), deadline=None)


def soaked(cases: Iterable[Any], *, but: Iterable[Any]) -> list[Any]:
    """Parameters of a test, or tuples of them, that run in `make soak` only, but for a few."""
    cases, kept = [*cases], [*but]
    assert all(case in cases for case in kept), "a name is misspelt"
    asleep = [case if type(case) is tuple else (case,) for case in cases]
    return [
        case if case in kept else pytest.param(*values, marks=pytest.mark.soak)
        for case, values in zip(cases, asleep, strict=True)
    ]
