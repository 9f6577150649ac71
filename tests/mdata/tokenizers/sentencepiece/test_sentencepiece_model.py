"""The reader of SentencePiece model files: the facts it finds, and everything that it refuses, by name."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import UsageError
from mdata.tokenizers.sentencepiece.sentencepiece_library import SentencePieceLibrary
from mdata.tokenizers.sentencepiece.sentencepiece_model import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    read_model,
)
from tests.helpers.examples import examples
from tests.mdata.tokenizers.models import BPE, BYTES, CHAR, START, UNIGRAM, bpe, field, model, piece, trained

A = ("a", -1.5, NORMAL)


def read(content):
    return read_model(content, "x.model")


def test_facts():
    pieces = [*START, *BYTES, A, ("\u2581", 0.25, USER_DEFINED), ("u", 0.0, UNUSED), ("<p>", 0.0, CONTROL)]
    facts = {"byte_fallback": 1, "suffix": 1, "escape_whitespaces": 0, "pad": "<p>", "charsmap": b"xyz", "eos": "a"}
    found = read(model(pieces, model_type=BPE, **facts))
    assert found.pieces == tuple(text for text, _, _ in pieces) and found.scores == tuple(s for _, s, _ in pieces)
    assert found.kinds == bytes(kind for _, _, kind in pieces)
    assert (found.model_type, found.byte_fallback, found.charsmap) == ("bpe", True, b"xyz")
    assert (found.add_dummy_prefix, found.remove_extra_whitespaces) == (True, True)
    assert (found.escape_whitespaces, found.whitespace_as_suffix) == (False, True)
    assert found.roles == {"unk": 0, "bos": 1, "pad": 262}
    assert (found.id_of("a"), found.id_of("nowhere"), found.id_of("</s>")) == (259, 0, 2)
    assert found.ids_of_kind(UNKNOWN, UNUSED) == [0, 261]


def test_what_is_not_said_has_its_default():
    found = read(b"".join(piece(*one) for one in (*START, A)))
    assert (found.model_type, found.byte_fallback, found.charsmap) == ("unigram", False, b"")
    assert found.add_dummy_prefix and found.remove_extra_whitespaces and found.escape_whitespaces
    assert read(model([*START, A], model_type=99)).model_type == "unigram", "as protobuf reads an unknown value"
    assert read(model([*START, A], model_type=CHAR)).model_type == "char"
    assert read(model([*START, ("b", 0.0, 77)])).kinds[3] == NORMAL


def test_later_fields_count_and_unknown_ones_do_not():
    good = model([*START, A], model_type=BPE)
    odd = (
        field(2, field(3, UNIGRAM) + field(3, BPE) + field(900, "x") + b"\x1d\0\0\0\0")
        + field(77, b"")
        + b"\x51"
        + bytes(8)
    )
    found = read(good + odd + field(1, field(1, "old") + field(1, "new") + b"\x15\0\0\x80?" + field(9, 9)))
    assert (found.model_type, found.pieces[-1], found.scores[-1]) == ("bpe", "new", 1.0)


LONG = [("z" * (n + 1), 0.0, USER_DEFINED) for n in range(65)]
UNUSABLE = [
    (b"", "an empty file"),
    (b"\x0a", "it ends inside a number"),
    (b"\x0a\xff\xff\xff\xff\xff\x01", "a number of more than 5 bytes at byte 1"),
    (b"\x08" + b"\xff" * 11, "a number of more than 10 bytes at byte 1"),
    (b"\x0a\x05ab", "it ends inside field 1, 3 bytes early"),
    (b"\x0b\x0c", "wire type 3 at byte 0"),
    (b"\x0f", "wire type 7 at byte 0"),
    (b"\x00\x01", "field number 0 at byte 0"),
    (field(2, b"\x0a"), "it ends inside a number"),
    (field(4, field(1, b"\x0a")), "it ends inside a number"),
    (field(5, b"\x0a\x09"), "it ends inside field 1"),
    (field(2, ""), "no pieces"),
    (model([*START, ("", 0.0, NORMAL)]), "piece 3 is empty"),
    (model([*START, (b"\xff", 0.0, NORMAL)]), r"piece 3 is not UTF-8: b'\\xff'"),
    (model([*START, (b"\xed\xa0\x80", 0.0, NORMAL)]), "piece 3 is not UTF-8"),
    (model([*START, ("a", float("nan"), NORMAL)]), "the score of piece 3, 'a', is nan"),
    (model([*START, ("a", float("-inf"), NORMAL)]), "the score of piece 3, 'a', is -inf"),
    (model([*START, A, A]), "pieces 3 and 4 are both 'a'"),
    (model([*START, ("<s>", 0.0, NORMAL)]), "pieces 1 and 3 are both '<s>'"),
    (model([*START[1:], A]), "0 pieces for unknown characters"),
    (model([*START, ("b", 0.0, UNKNOWN)]), "2 pieces for unknown characters"),
    (model([*START, A, BYTES[0]]), "a piece for a byte, '<0x00>', in a model without byte fallback"),
    (model([*START, A, *BYTES[1:]], byte_fallback=1), "byte fallback with 255 of 256 bytes: '<0x00>' is missing"),
    (model([*START, A, *BYTES, ("<0x0a>", 0.0, BYTE)], byte_fallback=1), "'<0x0a>' is missing or not a byte"),
    (model(START), "no ordinary piece"),
    (model([*START, ("a\0b", 0.0, NORMAL)]), r"piece 3 holds the character U\+0000: b'a\\x00b'"),
    (model([*START, *LONG]), "more than 64 user-defined pieces that are prefixes of each other: 'z'"),
]


@pytest.mark.parametrize(("content", "message"), UNUSABLE)
def test_what_is_refused(content, message):
    with pytest.raises(UsageError, match=message) as caught:
        read(content)
    assert str(caught.value).startswith("x.model: ") and str(caught.value).count("\n") <= 2


def test_what_is_just_not_refused():
    assert len(read(model([*START, *LONG[1:]])).pieces) == 67
    assert len(read(model(START, model_type=BPE)).pieces) == 3


GOOD = [
    bpe([" ", "a", "b", "ab", " a"], [*BYTES, ("<c>", 0.0, CONTROL)], byte_fallback=1),
    model([*START, A, ("\u2581", -2.0, NORMAL)], model_type=UNIGRAM),
    trained(["a b c ab bc abc"] * 20, vocab_size=12, model_type="unigram", self_test_sample_size=2),
]


@examples(300)
@given(data=st.data())
def test_what_is_taken_is_taken_by_the_library(data):
    """Good models with bytes changed: a typed error, or a model that the library takes with the same vocabulary."""
    content = bytearray(data.draw(st.sampled_from(GOOD)))
    draw = random.Random(data.draw(st.integers(0, 1 << 32)))
    for _ in range(draw.choice([0, 1, 1, 2, 5])):
        at = draw.randrange(len(content))
        # Most of a model is texts and scores; what frames them is more telling.
        content[at] = draw.choice([draw.randrange(256), content[at] ^ 1 << draw.randrange(8), 0x0A, 0x12, 0x1A, 0xFF])
        if draw.random() < 0.1:
            del content[at : at + draw.choice([1, 7])]
    try:
        found = read(bytes(content))
    except UsageError:
        return
    if found.charsmap:
        return
    library = SentencePieceLibrary(bytes(content), "x").library
    assert library.vocab_size() == len(found.pieces)
    assert [library.id_to_piece(id) for id in range(len(found.pieces))] == list(found.pieces)
    assert [library.bos_id(), library.eos_id(), library.pad_id()] == [
        found.roles.get(r, -1) for r in ("bos", "eos", "pad")
    ]
    scores = [struct.unpack("<f", struct.pack("<f", library.get_score(id)))[0] for id in range(len(found.pieces))]
    assert scores == list(found.scores)
