"""How many examples a property test draws, and which parameters of a test run in `make soak` only.

`@examples(n)` draws n, times the factor that `make soak` sets as MDATA_SOAK (default 1). There is no deadline: test
machines are shared, and a slow example is not a bug.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
from hypothesis import settings

SOAK = int(os.environ.get("MDATA_SOAK", "1"))


def examples(count: int) -> settings:
    """Decorator for a @given test: `count` examples, or MDATA_SOAK times as many."""
    return settings(max_examples=count * SOAK, deadline=None)


def soaked(names: Iterable[str], *, but: Iterable[str]) -> list[object]:
    """Parameters of a test that run in `make soak` only, but for a few."""
    names, kept = [*names], {*but}
    assert kept <= {*names}, "a name is misspelt"
    return [name if name in kept else pytest.param(name, marks=pytest.mark.soak) for name in names]
