"""How many examples a property test draws: `@examples(n)`, times the factor that `make soak` sets.

MDATA_SOAK multiplies every count (default 1), so that one variable turns the whole suite into a long run. There is no
deadline: test machines are shared, and a slow example is not a bug.
"""

from __future__ import annotations

import os

from hypothesis import settings

SOAK = int(os.environ.get("MDATA_SOAK", "1"))


def examples(count: int) -> settings:
    """Decorator for a @given test: `count` examples, or MDATA_SOAK times as many."""
    return settings(max_examples=count * SOAK, deadline=None)
