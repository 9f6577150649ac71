from __future__ import annotations

from fractions import Fraction

import blake3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata.util.random_keys import Key, KeyStem, derive_key

PARTS = st.lists(st.integers() | st.text() | st.binary(), max_size=4)


def test_known_answers():
    """These freeze the construction: other answers are another version of every order."""
    assert derive_key("a") == Key(1091826135637183855, 7726137038520247090, 92630856977627613458581620827302708583)
    assert derive_key("test", 1, "x", b"y", -5) == Key(
        3614925405837863900, 9538248513783255192, 255272135082122806577060000098960554434
    )


def test_the_encoding_is_the_documented_one():
    text = b"s" + (4).to_bytes(8, "little") + b"test" + b"i" + (2).to_bytes(8, "little") + b"-7"
    derived = blake3.blake3(text, derive_key_context="mdata 2026 random keys v1").digest(length=32)
    key = derive_key("test", -7)
    assert key.low.to_bytes(8, "little") + key.high.to_bytes(8, "little") == derived[:16]
    assert key.draw.to_bytes(16, "little") == derived[16:]


@given(PARTS, PARTS)
def test_a_stem_gives_the_keys_that_begin_with_it(first, rest):
    stem = KeyStem("p", *first)
    assert stem.key(*rest) == stem.key(*rest) == derive_key("p", *first, *rest)


@given(PARTS, PARTS)
def test_different_parts_give_different_keys(a, b):
    same = [(type(part), part) for part in a] == [(type(part), part) for part in b]
    assert (derive_key("p", *a) == derive_key("p", *b)) == same


@pytest.mark.parametrize("a, b", [(("ab", "c"), ("a", "bc")), ((1,), ("1",)), (("x",), (b"x",)), ((12, 3), (1, 23))])
def test_parts_do_not_run_together(a, b):
    assert derive_key("p", *a) != derive_key("p", *b)


@given(st.integers(0, 2**128 - 1), st.integers(1, 2**64))
def test_below_scales_the_draw(draw, m):
    value = Key(0, 0, draw).below(m)
    assert 0 <= value < m
    assert value == int(Fraction(draw, 2**128) * m)


def test_below_reaches_every_value():
    assert {derive_key("p", i).below(5) for i in range(200)} == set(range(5))


@pytest.mark.parametrize("part", [True, 1.5, None])
def test_other_types_are_no_parts(part):
    with pytest.raises(AssertionError, match="part"):
        derive_key("p", part)
