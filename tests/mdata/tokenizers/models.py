"""SentencePiece models made for tests: written out piece by piece, or trained on a few lines."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Sequence

from mdata.tokenizers.sentencepiece.sentencepiece_model import BLANK, BYTE, CONTROL, NORMAL, UNKNOWN

BPE, UNIGRAM, WORD, CHAR = 2, 1, 3, 4
# Name -> field number, of the trainer's and of the normalizer's facts.
TRAINER = {"model_type": 3, "suffix": 24, "byte_fallback": 35, "unk": 45, "bos": 46, "eos": 47, "pad": 48}
NORMALIZER = {"charsmap": 2, "add_dummy_prefix": 3, "remove_extra_whitespaces": 4, "escape_whitespaces": 5}
START = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
BYTES = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]

Piece = tuple[str | bytes, float, int]


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | str | bytes) -> bytes:
    """One field of a protobuf message: a whole number or bytes."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def piece(text: str | bytes, score: float = 0.0, kind: int = NORMAL) -> bytes:
    return field(1, field(1, text) + b"\x15" + struct.pack("<f", score) + field(3, kind))


def model(pieces: Iterable[Piece], **facts: int | str | bytes) -> bytes:
    """A model file; `facts` by the names above."""
    trainer = b"".join(field(TRAINER[name], value) for name, value in facts.items() if name in TRAINER)
    normalizer = b"".join(field(NORMALIZER[name], value) for name, value in facts.items() if name in NORMALIZER)
    assert facts.keys() <= TRAINER.keys() | NORMALIZER.keys()
    return b"".join(piece(*one) for one in pieces) + field(2, trainer) + field(3, normalizer)


def bpe(words: Sequence[str], more: Iterable[Piece] = (), **facts: int | str | bytes) -> bytes:
    """A BPE model whose pieces are these, the first to be merged first; blanks are written as blanks."""
    pieces = [(word.replace(" ", BLANK), -float(rank), NORMAL) for rank, word in enumerate(words)]
    defaults: dict[str, int | str | bytes] = {"model_type": BPE, "remove_extra_whitespaces": 0}
    return model([*START, *pieces, *more], **{**defaults, **facts})


def trained(lines: Sequence[str], **options: object) -> bytes:
    """A model that the library learns from these lines."""
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.set_min_log_level(3)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, hard_vocab_limit=False, num_threads=1, minloglevel=3, **options
    )
    return out.getvalue()
