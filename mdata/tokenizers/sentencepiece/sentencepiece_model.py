"""Reads a SentencePiece model file without the library: pieces, scores, kinds, and how text is prepared.

The file is a protobuf message (ModelProto of sentencepiece_model.proto). Everything that the library would refuse,
print a warning about on stderr or crash on is refused here first, with its name, so an accepted file also loads there.
As in protobuf, a repeated field replaces the earlier value, unknown fields are skipped, and unknown kinds of pieces
count as ordinary ones. Stricter than protobuf: pieces must be UTF-8, scores finite numbers, and groups (an encoding
that no writer of such files uses) are refused.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from mdata.errors import UsageError, counted

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MODEL_TYPES = MappingProxyType({1: "unigram", 2: "bpe", 3: "word", 4: "char"})
ORDINARY = frozenset({NORMAL, USER_DEFINED, UNUSED})
BLANK = "\u2581"

# The library expects at most this many user-defined pieces at one position; with more it reads out of bounds.
MOST_NESTED = 64

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER, _SELF_TEST, _DENORMALIZER = range(1, 6)
_CHARSMAP = 2
_ROLES = MappingProxyType({46: ("bos", b"<s>"), 47: ("eos", b"</s>"), 48: ("pad", b"<pad>")})
_EXPECTED = "a SentencePiece model, such as tokenizer.model of Llama 2"


@dataclass(frozen=True, kw_only=True)
class SentencePieceModel:
    """The facts of a model that decide ids.

    Attributes:
        pieces: their texts, blanks written as U+2581; the id is the position.
        scores: float32 values.
        kinds: NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED or BYTE.
        model_type: "unigram", "bpe", "word" or "char".
        byte_fallback: characters that are not pieces become bytes.
        charsmap: the compiled rules of normalization; empty: none.
        add_dummy_prefix: a blank is put before every text.
        remove_extra_whitespaces: blanks at the ends are removed, runs become one.
        escape_whitespaces: blanks become U+2581.
        whitespace_as_suffix: a blank belongs to the preceding word.
        roles: "unk", "bos", "eos", "pad" -> id, if the model has that role.
    """

    pieces: tuple[str, ...]
    scores: tuple[float, ...]
    kinds: bytes
    model_type: str
    byte_fallback: bool
    charsmap: bytes
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    escape_whitespaces: bool
    whitespace_as_suffix: bool
    roles: Mapping[str, int]

    def ids_of_kind(self, *kinds: int) -> list[int]:
        """The ids of all pieces of these kinds."""
        return [id for id, kind in enumerate(self.kinds) if kind in kinds]

    def id_of(self, piece: str) -> int:
        """The id of a piece; the id of unk if there is none."""
        return self.ids.get(piece, self.roles["unk"])

    @cached_property
    def ids(self) -> Mapping[str, int]:
        """Ids by piece."""
        return {text: id for id, text in enumerate(self.pieces)}


class _BrokenError(Exception):
    """Not a protobuf message of the expected form; says why."""


def read_model(content: bytes, name: str) -> SentencePieceModel:
    """Read and check a model file.

    Raises:
        UsageError: not a model, or one that the library refuses or handles incorrectly.
    """
    if not content:
        raise UsageError(f"{name}: an empty file", expected=_EXPECTED)
    try:
        pieces, trainer, normalizer = _parse(memoryview(content))
    except _BrokenError as error:
        raise UsageError(f"{name}: not a SentencePiece model, or a damaged one", found=str(error)) from error
    try:
        return _checked(pieces, trainer, normalizer)
    except _BrokenError as error:
        raise UsageError(f"{name}: a SentencePiece model that cannot be used", found=str(error)) from error


class _Field(NamedTuple):
    """A field of a protobuf message, with an integer or with bytes, by its wire type."""

    number: int
    wire_type: int
    integer: int
    content: memoryview


def _fields(data: memoryview) -> Iterator[_Field]:
    at, end = 0, len(data)
    nothing = data[:0]
    while at < end:
        start = at
        tag, at = _varint(data, at, longest=5)
        number, wire = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise _BrokenError(f"field number {number} at byte {start}")
        if wire == _VARINT:
            integer, at = _varint(data, at, longest=10)
            yield _Field(number, wire, integer, nothing)
            continue
        if wire == _BYTES:
            size, at = _varint(data, at, longest=5)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise _BrokenError(f"wire type {wire} at byte {start}")
        if size > end - at:
            raise _BrokenError(f"it ends inside field {number}, {size - (end - at):,} bytes early")
        yield _Field(number, wire, 0, data[at : at + size])
        at += size


def _varint(data: memoryview, at: int, *, longest: int) -> tuple[int, int]:
    """A whole number stored in 7 bits per byte, and the position after it."""
    value = 0
    for place in range(longest):
        if at + place >= len(data):
            raise _BrokenError("it ends inside a number")
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + place + 1
    raise _BrokenError(f"a number of more than {longest} bytes at byte {at}")


_RawPiece = tuple[bytes, float, int]


@dataclass(frozen=True)
class _Facts:
    """The last value of each field of a submessage, by number; numbers and bytes separately."""

    integers: dict[int, int]
    data: dict[int, bytes]

    def flag(self, number: int, *, default: bool) -> bool:
        return bool(self.integers.get(number, default))


def _parse(data: memoryview) -> tuple[list[_RawPiece], _Facts, _Facts]:
    """The pieces, and the facts of the trainer and of the normalizer."""
    pieces: list[_RawPiece] = []
    facts = {_TRAINER: _Facts({}, {}), _NORMALIZER: _Facts({}, {})}
    for number, wire, _, part in _fields(data):
        if wire != _BYTES:
            continue
        if number == _PIECES:
            pieces.append(_piece(part))
        elif number in facts:
            for inner, kind, integer, content in _fields(part):
                if kind == _VARINT:
                    facts[number].integers[inner] = integer
                elif kind == _BYTES:
                    facts[number].data[inner] = bytes(content)
        elif number in (_SELF_TEST, _DENORMALIZER):
            for inner, kind, _, content in _fields(part):
                if (number, inner, kind) == (_SELF_TEST, 1, _BYTES):
                    _passed_over(content)
    return pieces, facts[_TRAINER], facts[_NORMALIZER]


def _passed_over(data: memoryview) -> None:
    for _ in _fields(data):
        pass


def _piece(data: memoryview) -> _RawPiece:
    text, score, kind = b"", 0.0, NORMAL
    for number, wire, integer, part in _fields(data):
        if (number, wire) == (1, _BYTES):
            text = bytes(part)
        elif (number, wire) == (2, _FIXED32):
            (score,) = struct.unpack("<f", part)
        elif (number, wire) == (3, _VARINT) and NORMAL <= integer & 0xFFFFFFFF <= BYTE:
            kind = integer & 0xFFFFFFFF
    return text, score, kind


def _checked(pieces: list[_RawPiece], trainer: _Facts, normalizer: _Facts) -> SentencePieceModel:
    if not pieces:
        raise _BrokenError("no pieces")
    # An unknown value of an enumeration counts as absent.
    model_type = MODEL_TYPES.get(trainer.integers.get(3, 1) & 0xFFFFFFFF, "unigram")
    texts = [_text(id, piece) for id, (piece, _, _) in enumerate(pieces)]
    kinds = bytes(kind for _, _, kind in pieces)
    for id, (_, score, _) in enumerate(pieces):
        if not math.isfinite(score):
            raise _BrokenError(f"the score of piece {id}, {texts[id]!r}, is {score}")
    byte_fallback = trainer.flag(35, default=False)
    _check_once(texts)
    _check_kinds(texts, kinds, byte_fallback=byte_fallback, unigram=model_type == "unigram")
    _check_nesting([text for text, kind in zip(texts, kinds, strict=True) if kind == USER_DEFINED])
    return SentencePieceModel(
        pieces=tuple(texts),
        scores=tuple(score for _, score, _ in pieces),
        kinds=kinds,
        model_type=model_type,
        byte_fallback=byte_fallback,
        charsmap=normalizer.data.get(_CHARSMAP, b""),
        add_dummy_prefix=normalizer.flag(3, default=True),
        remove_extra_whitespaces=normalizer.flag(4, default=True),
        escape_whitespaces=normalizer.flag(5, default=True),
        whitespace_as_suffix=trainer.flag(24, default=False),
        roles=_roles(trainer, texts, kinds),
    )


def _text(id: int, piece: bytes) -> str:
    if not piece:
        raise _BrokenError(f"piece {id} is empty")
    if b"\0" in piece:
        raise _BrokenError(f"piece {id} holds the character U+0000: {piece[:40]!r}")
    try:
        return piece.decode()
    except UnicodeDecodeError as error:
        raise _BrokenError(f"piece {id} is not UTF-8: {piece[:40]!r}") from error


def _check_once(texts: Sequence[str]) -> None:
    id_of_text: dict[str, int] = {}
    for id, text in enumerate(texts):
        if id_of_text.setdefault(text, id) != id:
            raise _BrokenError(f"pieces {id_of_text[text]} and {id} are both {text!r}")


def _check_kinds(texts: Sequence[str], kinds: bytes, *, byte_fallback: bool, unigram: bool) -> None:
    unknown = kinds.count(UNKNOWN)
    if unknown != 1:
        raise _BrokenError(f"{counted(unknown, 'piece')} for unknown characters (expected: one, such as <unk>)")
    of_bytes = {text for text, kind in zip(texts, kinds, strict=True) if kind == BYTE}
    if of_bytes and not byte_fallback:
        raise _BrokenError(f"a piece for a byte, {min(of_bytes)!r}, in a model without byte fallback")
    wanted = {f"<0x{byte:02X}>" for byte in range(256)}
    if byte_fallback and of_bytes != wanted:
        odd = min(of_bytes ^ wanted)
        raise _BrokenError(
            f"byte fallback with {len(of_bytes & wanted)} of 256 bytes: {odd!r} is missing or not a byte"
        )
    if unigram and not any(kind in ORDINARY for kind in kinds):
        raise _BrokenError("no ordinary piece")


def _check_nesting(user_defined: list[str]) -> None:
    """At most MOST_NESTED of them may be prefixes of each other."""
    chain: list[str] = []
    for text in sorted(user_defined):
        while chain and not text.startswith(chain[-1]):
            chain.pop()
        chain.append(text)
        if len(chain) > MOST_NESTED:
            raise _BrokenError(
                f"more than {MOST_NESTED} user-defined pieces that are prefixes of each other: {chain[0]!r} ..."
            )


def _roles(trainer: _Facts, texts: Sequence[str], kinds: bytes) -> dict[str, int]:
    """Ids by role: the control piece with that name; unk is the only unknown piece."""
    roles = {"unk": kinds.index(UNKNOWN)}
    control = {text: id for id, text in enumerate(texts) if kinds[id] == CONTROL}
    for number, (role, default) in _ROLES.items():
        # The library passes the name as a string that ends at its first NUL.
        name = (trainer.data.get(number) or default).split(b"\0")[0].decode(errors="replace")
        if name in control:
            roles[role] = control[name]
    return roles
