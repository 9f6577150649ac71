"""SentencePiece's BPE in plain Python: the slow twin of mdata_cpp/sentencepiece.hpp.

A text becomes ids in three steps: it is prepared (normalization, blanks), split into characters and user-defined
pieces, and then the adjacent pair with the highest score that forms a piece is merged (the leftmost of equals), until
none is left. Not for models with unused pieces.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise

from mdata.tokenizers.sentencepiece.sentencepiece_model import BLANK, NORMAL, USER_DEFINED, SentencePieceModel


def encode(model: SentencePieceModel, text: str) -> list[int]:
    """The ids of a text."""
    users = [model.pieces[id] for id in model.ids_of_kind(USER_DEFINED)]
    joined = {model.pieces[id]: model.scores[id] for id in model.ids_of_kind(NORMAL)}
    # User-defined pieces are never merged.
    symbols = list(_parts(prepare(model, text, users=users), users))
    while True:
        pairs = [
            (-joined[left + right], at)
            for at, ((left, own), (right, other)) in enumerate(pairwise(symbols))
            if not own and not other and left + right in joined
        ]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [(symbols[at][0] + symbols[at + 1][0], False)]
    ids: list[int] = []
    for symbol, own in symbols:
        if own or symbol in joined:
            ids.append(model.ids[symbol])
        elif model.byte_fallback:
            ids += [model.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        elif ids[-1:] != [model.roles["unk"]]:
            ids.append(model.roles["unk"])
    return ids


def prepare(model: SentencePieceModel, text: str, *, users: Sequence[str]) -> str:
    """The text after normalization, with blanks as U+2581."""
    steps = list(_steps(model, text, users))
    if model.remove_extra_whitespaces:
        while steps and steps[0] == " ":
            del steps[0]
    out, after_blank = "", model.remove_extra_whitespaces
    for step in steps:
        rest = step.lstrip(" ") if after_blank else step
        out += rest.replace(" ", BLANK)
        if rest:
            after_blank = model.remove_extra_whitespaces and rest.endswith(" ")
    if not steps:
        return ""
    prefix = BLANK if model.add_dummy_prefix and not model.whitespace_as_suffix else ""
    suffix = BLANK if model.add_dummy_prefix and model.whitespace_as_suffix else ""
    return ((prefix + out).rstrip(BLANK) if model.remove_extra_whitespaces else prefix + out) + suffix


def _steps(model: SentencePieceModel, text: str, users: Sequence[str]) -> Iterator[str]:
    """The output of each rule, or of each character without a rule; user-defined pieces stay."""
    at = 0
    while at < len(text):
        if own := _longest(text, at, users):
            replacement, size = own, len(own)
        else:
            replacement, size = _rule(model.charsmap, text[at : at + 64]) or (text[at], 1)
        yield replacement
        at += size


def _parts(text: str, users: Sequence[str]) -> Iterator[tuple[str, bool]]:
    at = 0
    while at < len(text):
        own = _longest(text, at, users)
        yield own or text[at], bool(own)
        at += len(own) or 1


def _longest(text: str, at: int, among: Sequence[str]) -> str:
    return max((one for one in among if text.startswith(one, at)), key=len, default="")


def _rule(charsmap: bytes, text: str) -> tuple[str, int] | None:
    """The longest rule that matches the start of the text: its output, and the number of characters it replaces.

    The rules are a double-array trie over UTF-8; see Charsmap in mdata_cpp/sentencepiece_text.hpp.
    """
    if not charsmap:
        return None
    (trie_bytes,) = struct.unpack_from("<I", charsmap)
    found = None

    def unit(number: int) -> int:
        return int(struct.unpack_from("<I", charsmap, 4 + 4 * number)[0]) if number < trie_bytes // 4 else 0

    def offset(of: int) -> int:
        return (of >> 10 & 0x1FFFFF) << (8 if of >> 9 & 1 else 0)

    place = offset(unit(0))
    data = text.encode()
    for at, byte in enumerate(data):
        place ^= byte
        if unit(place) & 0x800000FF != byte or place >= trie_bytes // 4:
            break
        ends, place = unit(place) >> 8 & 1, place ^ offset(unit(place))
        if ends:
            start = 4 + trie_bytes + (unit(place) & 0x7FFFFFFF)
            found = charsmap[start : charsmap.index(b"\0", start)].decode(), len(data[: at + 1].decode())
    return found
