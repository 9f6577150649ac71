"""Checks of single values of an index: each returns the value with its type, or raises an `IndexFault` that names it.

An index is untrusted input: every value passes one of these checks before use. How values fit together is checked in
format.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

_MOST = (1 << 63) - 1
_MOST_DIMS = 4  # of tensors; experts and convolutions of our models have 3, most others 1 or 2


@dataclass
class IndexFault(ValueError):
    """A value that mtrain never writes into an index.

    Args:
        place: of the value, such as "run/step"; "": the whole file. found, expected: the values.
    """

    place: str
    found: object
    expected: str

    @property
    def shown(self) -> str:
        """The value for the user: in a damaged file it may be long or not printable."""
        return ascii(self.found)[1:-1][:120] if isinstance(self.found, str) else ascii(self.found)[:120]


def is_of_type(value: Any, hint: Any) -> bool:
    """Whether a JSON value is of the type of a dataclass field."""
    kinds = get_args(hint) if get_origin(hint) not in (None, dict, list, tuple) else (hint,)
    return any(type(value) is (get_origin(kind) or kind) for kind in kinds)


def object_of(value: Any, place: str) -> dict[str, Any]:
    """The value, checked to be a JSON object."""
    if type(value) is not dict:
        raise IndexFault(place, value, "a JSON object")
    return value


def list_of(value: Any, place: str) -> list[Any]:
    """The value, checked to be a list."""
    if type(value) is not list:
        raise IndexFault(place, value, "a list")
    return value


def check_keys(table: Mapping[str, Any], keys: set[str], *, place: str) -> None:
    """Check that a table has exactly these keys."""
    if table.keys() != keys:
        raise IndexFault(place, ", ".join(sorted(table)) or "nothing", ", ".join(sorted(keys)) or "nothing")


def text_of(value: Any, place: str, *, form: re.Pattern[str]) -> str:
    """The value, checked to be text of this form."""
    if type(value) is not str or not form.fullmatch(value):
        raise IndexFault(place, value, f"text of the form {form.pattern}")
    return value


def whole_number(value: Any, place: str, *, low: int) -> int:
    """The value, checked to be an integer of at least `low` and below 2^63."""
    if type(value) is not int or not low <= value <= _MOST:
        raise IndexFault(place, value, f"an integer of at least {low}")
    return value


def sizes_of(value: Any, place: str, *, low: int) -> tuple[int, ...]:
    """The value, checked to be a list of integers, one for each dim."""
    if type(value) is not list or not 1 <= len(value) <= _MOST_DIMS:
        raise IndexFault(place, value, f"a list of 1 to {_MOST_DIMS} integers")
    return tuple(whole_number(item, place, low=low) for item in value)


def is_history(rows: Any) -> bool:
    """Whether these are rows of 3 numbers from 0 on, as FP8 keeps them."""
    return type(rows) is list and all(
        type(row) is list and len(row) == 3 and all(type(x) is float and 0 <= x < math.inf for x in row) for row in rows
    )
