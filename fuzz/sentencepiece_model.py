"""The reader of SentencePiece model files: a typed error, or a model that the library takes too and reads the same.

The first byte chooses: 0, the rest is the file; 1, the rest is one of a few small good models with bytes replaced
(pairs of place and byte); 2, pieces and facts are built from the rest, so that the checks behind the framing are
reached.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator

from fuzz.record_lines import check_message
from mdata.errors import UsageError
from mdata.tokenizers.sentencepiece.sentencepiece_library import SentencePieceLibrary
from mdata.tokenizers.sentencepiece.sentencepiece_model import read_model

TEXTS = (b"<unk>", b"<s>", b"</s>", b"<pad>", b"\xe2\x96\x81", b"a", b"b", b"ab", b"\xe2\x96\x81a", b"\xff", b"\0", b"")
SCORES = (0.0, -1.0, -2.5, float("nan"), float("inf"), 1e38)
# Nine pieces, <unk> first, and 256 bytes; a BPE model with byte fallback.
KINDS = (2, 3, 3, 3, 1, 1, 1, 1, 1)
GOOD = bytes([9, 1, *(v for text, kind in enumerate(KINDS) for v in (text, 0, text % 3, kind)), 2, 0, 2, 2, 1])
TRAINER, NORMALIZER = (3, 24, 35, 45, 46, 47, 48), (2, 3, 4, 5)


def check(data: bytes) -> None:
    """One file."""
    content = made(data)
    try:
        model = read_model(content, "x.model")
    except UsageError as error:
        check_message(str(error))
        return
    try:
        engine = SentencePieceLibrary(content, "x.model")
    except UsageError as error:
        check_message(str(error))
        assert model.charsmap, f"the library refuses what we take: {error}"
        return
    library = engine.library
    assert library.vocab_size() == len(model.pieces)
    ids = list(range(len(model.pieces)))
    assert library.id_to_piece(ids) == list(model.pieces) and library.get_score(ids) == list(model.scores)
    roles = [library.bos_id(), library.eos_id(), library.pad_id()]
    assert roles == [model.roles.get(role, -1) for role in ("bos", "eos", "pad")]
    found, lengths = engine.encode(["ab a  b", "", "\u2581\0\u00e9"])
    assert len(found) == lengths.sum() and set(found.tolist()) <= set(ids)


def made(data: bytes) -> bytes:
    """The file that an input stands for."""
    choice, rest = data[:1], data[1:]
    if choice == b"\x01":
        content = bytearray(built(GOOD + rest[:4]))
        for place, byte in pairs(rest[4:]):
            content[place % len(content)] = byte
        return bytes(content)
    return built(rest) if choice == b"\x02" else rest


def pairs(data: bytes) -> Iterator[tuple[int, int]]:
    """(place, byte) of each three bytes."""
    for at in range(0, len(data) - 2, 3):
        yield int.from_bytes(data[at : at + 2], "little"), data[at + 2]


def built(data: bytes) -> bytes:
    """A model whose pieces and facts the bytes choose."""
    values = iter(data)
    count, with_bytes = next(values, 0) % 12, next(values, 0)
    out = b"".join(piece(values) for _ in range(count))
    if with_bytes % 2:
        out += b"".join(field(1, field(1, b"<0x%02X>" % byte) + field(3, 6)) for byte in range(256))
    for part, numbers in ((2, TRAINER), (3, NORMALIZER)):
        facts = b""
        for number in itertools.islice(values, next(values, 0) % 6):
            known = numbers[number % len(numbers)]
            is_text = known >= 45 if part == 2 else known == 2
            facts += field(known, TEXTS[next(values, 0) % len(TEXTS)] if is_text else next(values, 0) % 8)
        out += field(part, facts)
    return out


def piece(values: Iterator[int]) -> bytes:
    """One piece: a text, a score, a kind."""
    text = TEXTS[next(values, 0) % len(TEXTS)] * (1 + next(values, 0) % 2)
    score = SCORES[next(values, 0) % len(SCORES)]
    return field(1, field(1, text) + b"\x15" + struct.pack("<f", score) + field(3, next(values, 0) % 8))


def field(number: int, value: int | bytes) -> bytes:
    """One field of a message; numbers below 128 only."""
    if isinstance(value, int):
        return varint(number << 3) + bytes([value])
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    """Seven bits a byte."""
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)
