"""Sizes as people write them ("500 GiB", "5GB", "2.5 TiB", or a number of bytes), converted to bytes.

KB and MB are powers of 1,000, KiB and MiB of 1,024, in upper or lower case. Callers write the message for a text that
is not a size.
"""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = ("", "K", "M", "G", "T", "P")
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([KMGTP]?)(I?)B?")


def parse_size(text: str) -> int | None:
    """The bytes of a size; KB is 1,000 and KiB 1,024. None: not a size, or zero."""
    found = _SIZE.fullmatch(text.strip().upper())
    if found is None or (found[3] and not found[2]):
        return None
    return int(Fraction(found[1]) * (1024 if found[3] else 1000) ** _UNITS.index(found[2])) or None
