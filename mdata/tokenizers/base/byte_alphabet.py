"""GPT-2's way to write bytes as printable characters, which all byte-level vocabularies use.

Printable Latin-1 characters stand for their own byte; the other bytes take U+0100, U+0101 ... in order.
"""

from __future__ import annotations

from types import MappingProxyType

END_OF_TEXT = "<|endoftext|>"

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = tuple(byte for byte in range(256) if byte not in _PRINTABLE)

# The character of each byte, in the order of the bytes.
ALPHABET = tuple(chr(byte if byte in _PRINTABLE else 0x100 + _OTHERS.index(byte)) for byte in range(256))
_BYTE_OF = MappingProxyType({ord(symbol): byte for byte, symbol in enumerate(ALPHABET)})


def to_bytes(token: str) -> bytes:
    """The bytes that an entry of a byte-level vocabulary stands for; it must be spelled in ALPHABET."""
    return token.translate(_BYTE_OF).encode("latin-1")


def from_bytes(content: bytes) -> str:
    """How a byte-level vocabulary spells these bytes."""
    return "".join(ALPHABET[byte] for byte in content)
