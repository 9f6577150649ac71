"""A dataset opened by flat keys, for tests whose cases differ in kinds and orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mdata


def open_by_keys(path: str | Path, **keys: Any) -> mdata.Dataset:
    """Open a dataset as a run or a command does; see `DatasetOptions.from_keys`."""
    return mdata.Dataset.from_options(path, mdata.DatasetOptions.from_keys(keys))
