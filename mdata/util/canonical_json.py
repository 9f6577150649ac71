"""Canonical JSON (one text for every value) and its BLAKE3 hash, from which ids and checksums are made.

White space and the order of keys do not matter. Floating-point numbers are refused, because their text differs between
programs.
"""

from __future__ import annotations

import json

from blake3 import blake3


def canonical(value: object) -> bytes:
    """The canonical text of a JSON value: UTF-8, sorted keys, no blanks.

    Raises:
        TypeError: the value contains a float.
    """
    refuse_floats(value)
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()


def hash_of(value: object) -> str:
    """BLAKE3 of the canonical text of a JSON value, in hex."""
    return blake3(canonical(value)).hexdigest()


_PLAIN = frozenset({str, int, bool, type(None)})


def refuse_floats(value: object) -> None:
    """Raise TypeError, with the position, if a JSON value contains a float."""
    if _has_float(value):
        raise TypeError(f"a float at {_float_in(value, '$')}: floats have no unique text form; store it as a string")


def _has_float(value: object) -> bool:
    # A manifest has hundreds of values, a blend thousands of manifests: positions are named only on demand.
    if type(value) in _PLAIN:
        return False
    if isinstance(value, dict):
        return any(map(_has_float, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_float, value))
    return isinstance(value, float)


def _float_in(value: object, path: str) -> str | None:
    """The position of the first float, for a message."""
    if isinstance(value, float):
        return path
    items: list[tuple[str, object]] = []
    if isinstance(value, dict):
        items = [(f"{path}.{key}", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{path}[{number}]", item) for number, item in enumerate(value)]
    return next((float_at for place, item in items if (float_at := _float_in(item, place))), None)
