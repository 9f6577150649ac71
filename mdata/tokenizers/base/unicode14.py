"""Code points that Unicode 14 (2021) had not assigned, and a fast search for them in texts.

Libraries use different editions of Unicode and so split words differently around newer characters: gigatoken 0.10 uses
edition 17, tokenizers 0.23 and tiktoken 0.14 use 16, which differ in 4,657 code points. All editions in use agree on
the code points of edition 14, so texts with other code points are left to the exact engine. The table
unicode14_unassigned.txt is generated: in hexadecimal, the first code point of each gap and the first after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mdata.tokenizers.base.helpers import batches

_FIRST = 0x378
# Small enough for the cache, large enough that the cost of calls is small.
_GROUP_CHARS = 16 << 10


@cache
def unassigned() -> npt.NDArray[np.bool_]:
    """For every code point: whether edition 14 had not assigned it (surrogates count as assigned)."""
    table = Path(__file__).with_name("unicode14_unassigned.txt").read_text(encoding="ascii")
    bounds = np.array([0, *(int(word, 16) for word in table.split()), 0x110000])
    flags = np.arange(len(bounds) - 1) % 2 == 1
    return np.repeat(flags, np.diff(bounds))


def texts_with_newer_characters(texts: Sequence[str]) -> list[int]:
    """The indices of texts with an unassigned code point."""
    # A string knows whether it is ASCII.
    indices = [index for index, text in enumerate(texts) if not text.isascii()]
    others = [texts[index] for index in indices]
    with_newer: list[int] = []
    for start, stop in batches(others, _GROUP_CHARS):
        if _has_newer("".join(others[start:stop])):
            with_newer += [index for index in indices[start:stop] if _has_newer(texts[index])]
    return with_newer


def _has_newer(text: str) -> bool:
    codes = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), dtype=np.uint16)
    codes = codes[codes >= _FIRST]
    if not len(codes):
        return False
    if ((codes & 0xF800) == 0xD800).any():
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    return bool(unassigned()[codes].any())
