"""Random keys: every random draw on the data side starts here.

A draw is f(key, index), and a key is a hash of a purpose and its parts, such as `derive_key("native-order", seed,
corpus_id, epoch)`: no generator is advanced, so nothing depends on what was drawn before. The construction is BLAKE3 in
its derive-key mode (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020) with the context below, which includes the
version: a changed construction needs a new context and new known answers (tests/mdata/util/test_random_keys.py).

Encoding of purpose and parts, each in turn: one byte for the kind (`i`, `s` or `b`), the number of bytes of
the content as 8 bytes little endian, the content (an integer in decimal ASCII, a string in UTF-8). Lengths
come first, so no two lists of parts have the same encoding. 32 bytes are derived, read as little-endian
integers: 0 to 7 `low`, 8 to 15 `high`, 16 to 31 `draw`.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import blake3

CONTEXT = "mdata 2026 random keys v1"
_WORDS = struct.Struct("<4Q")


class Key(NamedTuple):
    """128 bits of key for a permutation or a counter-based generator, and one 128-bit draw beside them.

    Attributes:
        low: the lower 64 bits of the key.
        high: the upper 64 bits of the key.
        draw: 128 further bits, for `below`.
    """

    low: int
    high: int
    draw: int

    def below(self, m: int) -> int:
        """An integer in [0, m): always the same one for a key, uniform over keys to within m / 2^128.

        Multiply-high reduction (D. Lemire, "Fast random integer generation in an interval", 2019).
        """
        assert m >= 1, f"below({m}): the range is empty"
        return (self.draw * m) >> 128


def derive_key(purpose: str, *parts: int | str | bytes) -> Key:
    """Derive the key for one use; another purpose, part, kind or order of parts gives an unrelated key."""
    return KeyStem(purpose, *parts).key()


class KeyStem:
    """Keys of one purpose with common first parts, which are hashed once.

    Args:
        purpose, parts: as of `derive_key`.
    """

    def __init__(self, purpose: str, *parts: int | str | bytes) -> None:
        self._hasher = blake3.blake3(b"".join(map(_encode, (purpose, *parts))), derive_key_context=CONTEXT)

    def key(self, *parts: int | str | bytes) -> Key:
        """The key of `derive_key` with these parts appended."""
        hasher = self._hasher.copy()
        for part in parts:
            hasher.update(_encode(part))
        low, high, draw, more = _WORDS.unpack(hasher.digest(length=32))
        return Key(low, high, draw | more << 64)


def _encode(part: int | str | bytes) -> bytes:
    assert not isinstance(part, bool), "a bool cannot be part of a key: use a string that says what it means"
    if isinstance(part, int):
        kind, content = b"i", str(part).encode("ascii")
    elif isinstance(part, str):
        kind, content = b"s", part.encode("utf-8")
    else:
        assert isinstance(part, bytes), f"a value of type {type(part).__name__} cannot be part of a key"
        kind, content = b"b", part
    return kind + len(content).to_bytes(8, "little") + content
