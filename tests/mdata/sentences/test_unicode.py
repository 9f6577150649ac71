"""The table of characters in C++ against the Python and the `regex` that run the tests, code point by code point."""

from __future__ import annotations

import pytest

from mdata import _core
from mdata.sentences.punkt_engine import CHANGED, NEWER, facts_of, newer_characters
from mdata.sentences.splitter import build_splitter
from mdata.tokenizers.base.unicode14 import unassigned
from tests.mdata.sentences import visible

CODES = range(0x110000)
CAPITAL_I_WITH_DOT = "\u0130"


def test_every_code_point():
    newer = unassigned()
    facts = facts_of(map(chr, CODES))
    assert facts.pop(CAPITAL_I_WITH_DOT)[1] == "i\u0307"  # the one whose lower case is longer; a case of its own in C++
    for character, (flags, lower) in facts.items():
        code = ord(character)
        found, to_lower = _core.punkt_character(code)
        if newer[code] or code in CHANGED:
            assert found == NEWER, hex(code)
        else:
            assert (found, chr(code + to_lower)) == (flags, lower), hex(code)


def test_no_code_point_above_the_last():
    with pytest.raises(IndexError, match="code point"):
        _core.punkt_character(0x110000)


def test_newer_characters_come_with_their_lower_case():
    assert newer_characters(["abc", "\xe9", "x\U00010d50\u10fc", "\U0001fae8"]) == sorted(
        {"\u10fc", "\U0001fae8", *"\U00010d50", *"\U00010d50".lower()}
    )


def test_all_unassigned_code_points_in_one_text():
    splitter = build_splitter(visible.files(), language="ours", keep_newlines=False, engine="mdata")
    text = ". ".join(map(chr, range(0xE0080, 0xE0FFF))) + "."
    sentences, _ = splitter.split_batch([text])
    assert " ".join(sentences) == text
