"""Where the data of a run is: its paths as they were given, resolved from the folder in which the run was started."""

from __future__ import annotations

import os
from glob import has_magic, iglob
from pathlib import Path

import msgspec

from mdata.blend.data_path import is_weight
from mdata.corpus.open_part import is_stored
from mdata.dataset.mock_data import MOCK


class StartedIn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The folder in which a run was started: seen from the run folder, and absolute; None: unknown."""

    from_here: str | None = None
    absolute: str | None = None


def data_path(text: str, folder: str | Path, started_in: StartedIn) -> str:
    """A path or blend as a run was given it, where it is now.

    A relative one starts in the folder where the run was started; the run folder may have been moved with the data, or
    alone. If it is found in neither place, it stays relative to the working folder.
    """
    if is_stored(text) or text == MOCK:
        return text
    places = [Path(folder) / place for place in (started_in.from_here, started_in.absolute) if place is not None]
    return next(filter(None, (_placed(text, place) for place in places)), text)


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
