"""The slow twin of RWKVTokenizer: the longest entry first."""

from __future__ import annotations

from collections.abc import Mapping


def encode(text: str, ids: Mapping[bytes, int]) -> list[int]:
    """The ids of a text; every byte has an entry."""
    rest, out = text.encode(), list[int]()
    while rest:
        token = max((token for token in ids if rest.startswith(token)), key=len)
        out.append(ids[token])
        rest = rest[len(token) :]
    return out
