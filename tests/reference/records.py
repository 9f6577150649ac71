"""Twin of mdata/sources/jsonl.py: one line of JSON by the standard library alone, then every check one by one.

The result is the value of each key, or the kind of fault.
"""

from __future__ import annotations

import json
from typing import Any


def record(line: bytes, keys: tuple[str, ...]) -> list[str | list[str]] | str:
    """Return the values of the keys, or the kind of the fault."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError:
        return "not-utf8"
    if text.strip() == "":
        return "blank"
    try:
        value = json.loads(text, parse_int=float)
    except json.JSONDecodeError:
        return "not-json"
    except RecursionError:
        return "too-deep"
    if not isinstance(value, dict):
        return "not-object"
    found: list[str | list[str]] = []
    for key in keys:
        content: Any = value
        for name in [key] if key in value else key.split("."):
            if not isinstance(content, dict) or name not in content:
                return "no-key"
            content = content[name]
        for sentence in content if isinstance(content, list) else [content]:
            if not isinstance(sentence, str):
                return "bad-value"
            if any(0xD800 <= ord(character) <= 0xDFFF for character in sentence):
                return "surrogate"
        found.append(content)
    return found
