"""The fields of a JSON body, taken out one by one with checks of type and range; the rest is unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson

from trainer.serve.errors import ApiError


def parsed_body(body: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        ApiError: not JSON, or not an object.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ApiError(400, f"the body is a JSON {type(value).__name__}, not an object")
    return value


def is_whole(value: object) -> bool:
    """Whether this is an integer, and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether this is a finite number."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


class Fields:
    """A body; each method takes out one field, with its default if missing or null, or raises an ApiError."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = dict(body)

    def take(self, name: str) -> Any:
        """The raw value; None if missing."""
        return self._left.pop(name, None)

    def number(self, name: str, default: float) -> float:
        """A finite number; `Sampling` checks its range."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not is_number(value):
            raise self._refusal(name, value, "a number")
        return float(value)

    def whole(self, name: str, default: int, *, least: int, most: int) -> int:
        """An integer in a range."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not is_whole(value) or not least <= value <= most:
            raise self._refusal(name, value, f"an integer from {least} to {most}")
        return int(value)

    def flag(self, name: str) -> bool:
        """True or false; false by default."""
        value = self._left.pop(name, None)
        if value is not None and not isinstance(value, bool):
            raise self._refusal(name, value, "true or false")
        return bool(value)

    def texts(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings."""
        value = self._left.pop(name, None)
        listed = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            raise self._refusal(name, value, "a string or a list of strings")
        return tuple(listed)

    def bias(self, name: str) -> dict[int, float]:
        """An object of token id -> number."""
        value = self._left.pop(name, None)
        table = {} if value is None else value
        if not isinstance(table, dict) or not all(
            key.isascii() and key.isdecimal() and len(key) < 10 and is_number(more) for key, more in table.items()
        ):
            raise self._refusal(name, value, 'an object such as {"198": -5}')
        return {int(key): float(more) for key, more in table.items()}

    def refuse(self, name: str, *, unless: tuple[Any, ...], text: str) -> None:
        """Reject a field that asks for an unsupported feature.

        Args:
            unless: harmless values, besides null. text: why, or what to do instead.
        """
        value = self._left.pop(name, None)
        if value is not None and value not in unless:
            raise ApiError(400, f"{name} is not supported; {text}", param=name)

    def unknown(self) -> list[str]:
        """The fields that were not taken."""
        return sorted(self._left)

    def _refusal(self, name: str, value: object, expected: str) -> ApiError:
        return ApiError(400, f"{name} is {shortened(value)}, expected {expected}", param=name)


def shortened(value: object) -> str:
    """A value of a body, for a message."""
    text = orjson.dumps(value).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."
