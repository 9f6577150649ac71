"""Where the data of a run is: paths in a run's configuration, resolved from the folder in which the run was started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from glob import has_magic, iglob
from pathlib import Path
from typing import Any

from mdata.blend.data_path import is_weight
from mdata.corpus.open_part import is_stored
from mdata.dataset.mock_data import MOCK

STARTED_IN = "started_in"
"""In plan.json: where the run was started, as a path relative to the run folder and as an absolute path."""


def data_found(data: Mapping[str, Any], folder: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The [data] of a run, with relative paths resolved to where the data is, if it is found.

    They are resolved from the folder where the run was started; the run folder may have been moved with the data, or
    alone. Otherwise, and for run folders that do not record it, they stay relative to the working folder.
    """
    started = plan.get(STARTED_IN)
    named = (started.get("from_here"), started.get("absolute")) if isinstance(started, dict) else ()
    begun = [folder / place for place in named if isinstance(place, str)]

    def found(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(map(found, value))
        if not isinstance(value, str) or is_stored(value) or value == MOCK:
            return value
        return next(filter(None, (_placed(value, place) for place in begun)), value)

    return {key: found(value) if key in ("blend", "valid", "test", "cache") else value for key, value in data.items()}


def _placed(text: str, place: Path) -> str | None:
    """A data path, or Megatron's "0.7 a 0.3 b", resolved in this folder; None: some of the paths do not exist."""
    joined = os.path.join(place, text)  # noqa: PTH118 - keeps blanks and patterns
    if _is_there(joined):
        return joined
    words = [
        word if is_weight(word) or is_stored(word) else os.path.join(place, word)  # noqa: PTH118
        for word in text.split()
    ]
    one_each = len(" ".join(words).split()) == len(words)  # no blanks in the folder's own name
    return " ".join(words) if one_each and all(is_weight(word) or _is_there(word) for word in words) else None


def _is_there(path: str) -> bool:
    there = any(os.path.exists(path + end) for end in ("", ".json", ".idx"))  # noqa: PTH110 - of any length
    return is_stored(path) or there or (has_magic(path) and any(iglob(path)))  # noqa: PTH207
