"""Kill -9 at seeded times; see kills.py, which also runs 2,000 of them on many cores."""

from __future__ import annotations

import pytest

from mdata.util.machine_limits import usable_cores
from tests.mdata.preprocessing.kills import kill_many


@pytest.mark.soak
def test_kill_9_at_200_random_times(tmp_path):
    assert kill_many(200, usable_cores(), seed=2026, folder=tmp_path) >= 200
