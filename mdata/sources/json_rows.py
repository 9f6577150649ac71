"""Rows of JSON that are written again with another text: all their other fields keep their exact values.

orjson is faster, but rounds integers of more than 64 bits, and refuses NaN, 1e400 and lone surrogates, which rows may
have beside their text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def load_row(line: bytes) -> dict[str, Any]:
    """The fields of a row."""
    record = json.loads(line)
    assert isinstance(record, dict), "rows that are no objects are bad rows"
    return record


def dump_row(record: Mapping[str, Any]) -> bytes:
    """The line of a row."""
    try:
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # lone surrogates
        return json.dumps(record, separators=(",", ":")).encode()
