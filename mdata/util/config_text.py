"""Reads small TOML and JSON files, with one kind of error for everything that can be wrong with them.

Python's parsers report deep nesting as RecursionError and numbers with thousands of digits as a ValueError, and accept
numbers and depths that break later code. Here depth and size are limited; the caller adds the file name to the error.
Not for the records of an input (mdata/sources/jsonl.py), which have their own rules. Sizes as people write them ("500
GiB", "5GB", "2.5 TiB", or a number of bytes) become bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

MOST_LEVELS = 64
BYTE_ORDER_MARK = "\ufeff"  # some editors begin a file of UTF-8 with it
# A TOML key with more parts than that. tomllib's time and memory are quadratic in the number of parts: a key of 100 kB
# took 3 GB. Quoted text looks like such a key if it has 65 words joined by dots.
_WORD = r"""(?>[A-Za-z0-9_-]++|"(?>[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_\\-]){_WORD}(?>[ \t]*+\.[ \t]*+{_WORD}){{{MOST_LEVELS}}}")
_RANGE = range(-(1 << 63), 1 << 63)


def load_toml(text: str, *, parse_float: Callable[[str], Any] = float) -> dict[str, Any]:
    """What tomllib reads, whole numbers of any size included; a byte order mark is no part of the text.

    Raises:
        ValueError: it cannot be read, or is nested too deep; the reason in one line.
    """
    import tomllib  # not every command reads TOML

    text = text.removeprefix(BYTE_ORDER_MARK)
    if _LONG_KEY.search(text):
        raise ValueError(f"a key of more than {MOST_LEVELS} parts")
    try:
        return tomllib.loads(text, parse_float=parse_float)
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error


def parse_toml(text: str, *, parse_float: Callable[[str], Any] = float) -> dict[str, Any]:
    """Parse a TOML document.

    Raises:
        ValueError: it cannot be read; one line that says why.
    """
    tables: dict[str, Any] = _bounded(lambda: load_toml(text, parse_float=parse_float))
    return tables


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON document; a byte order mark is no part of the text.

    Raises:
        ValueError: it cannot be read; one line that says why.
    """
    if isinstance(text, str):  # of bytes, json removes it
        text = text.removeprefix(BYTE_ORDER_MARK)
    return _bounded(lambda: json.loads(text))


def _bounded(parse: Callable[[], Any]) -> Any:
    try:
        value = parse()
    except RecursionError as error:
        raise ValueError(_TOO_DEEP) from error
    except ValueError as error:
        if "integer string conversion" in str(error):  # Python's own limit, whose message is advice for programmers
            raise ValueError(_TOO_LARGE) from error
        raise
    level = [value]
    for _ in range(MOST_LEVELS):
        if any(type(item) is int and item not in _RANGE for item in level):
            raise ValueError(_TOO_LARGE)
        level = [inner for item in level for inner in _inside(item)]
        if not level:
            return value
    raise ValueError(_TOO_DEEP)


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


_TOO_DEEP = f"nested more than {MOST_LEVELS} levels deep"
_TOO_LARGE = "an integer beyond 64 bits"


_UNITS = ("", "K", "M", "G", "T", "P")
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([KMGTP]?)(I?)B?")


def parse_size(text: str) -> int | None:
    """The bytes of a size; KB is 1,000 and KiB 1,024. None: not a size, or zero."""
    match = _SIZE.fullmatch(text.strip().upper())
    if match is None or (match[3] and not match[2]):
        return None
    return int(Fraction(match[1]) * (1024 if match[3] else 1000) ** _UNITS.index(match[2])) or None
