"""The measures of texts against their slow twins, the thresholds, and the table of characters."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdata import _core
from mdata.cleaning import rules
from scripts.text_classes import classes_of
from tests.reference import text_rules as twin

pytestmark = pytest.mark.skipif(twin.EDITION != "14.0.0", reason="the twins ask Python, whose Unicode is another one")
PIECES = [
    *"ab.,'\u2019!?\u2026#-\u2022 \n\t\r\u00a0\u3002\u0130\u212a9\u0663\u0301\u4e2d\U0001f600_{[]\x00\x1c\x85\u2028",
    "the", "of", "and", "that", "\n\n", "  ", "...", "word ", "ab ab ", "1.5", "don't", "[12]", "[edit]", "javascript",
    "lorem ipsum", "use cookies", "use coo\u212aies", " x y z.", "\r\n", "\n ", "[citation needed]", "lorem",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.characters(exclude_categories=["Cs", "Cn"]), max_size=60).map("".join)


def own_words(text: str) -> list[str]:
    return [text.encode()[begin:end].decode() for begin, end in _core.word_spans(text).tolist()]


def test_the_table_is_that_of_the_script():
    table = _core.text_classes()
    codes = [*range(0x600), *range(0x600, 0x30000, 7)]
    assert [int(table[code]) for code in codes] == [classes_of(code) for code in codes]
    assert _core.text_classes_unicode() == "14.0"


@given(TEXTS)
def test_measures_are_those_of_the_twins(text):
    words = twin.words_of(text)
    assert own_words(text) == words
    stop_words = list(rules.STOP_WORDS)
    assert _core.gopher_measures([text], stop_words)[0].tolist() == twin.gopher(text, words, stop_words)
    assert _core.repetition_measures([text])[0].tolist() == twin.repetition(text, words)
    assert _core.fineweb_measures([text], 5)[0].tolist() == twin.fineweb(text, words, 5)
    assert _core.third_longest_lines([text])[0] == twin.third_longest(text)
    assert _core.word_counts([text])[0] == len([word for word in words if not twin.is_symbol(word)])
    assert _core.collapsed([text]) == [twin.collapsed(text)]


# Long enough for repeated n-grams, and words whose joined characters are those of others: "a b" and "ab".
REPEATING = st.lists(
    st.sampled_from([*"ab.", "ab", "abab", "of a much longer word\u00e9 ", "one, two."]), max_size=200
).map(" ".join)


@given(REPEATING, st.integers(0, 50), st.integers(0, 120))
def test_repetition_is_that_of_the_twin(text, first, last):
    text += f" {text[first:last]} x {text[first:last]}"
    assert _core.repetition_measures([text])[0].tolist() == twin.repetition(text, twin.words_of(text))


@given(TEXTS)
def test_c4_cuts_the_lines_of_the_twin(text):
    for least in (1, 5):
        kept, reasons = rules.c4_texts([text], rules.C4Rules(min_sentences=least))
        reason, wanted = twin.c4(text, least)
        assert reasons == [reason] and (reason or kept == [wanted])


@given(TEXTS)
def test_given_words_are_used(text):
    words = text.split()
    encoded, at, found = text.encode(), 0, []
    for word in words:
        at = encoded.index(word.encode(), at)
        found.append([at, at := at + len(word.encode())])
    arrays = [np.array(found, np.int64).reshape(-1, 2)]
    assert _core.gopher_measures([text], ["the"], arrays)[0].tolist() == twin.gopher(text, words, ["the"])
    assert _core.repetition_measures([text], arrays)[0].tolist() == twin.repetition(text, words)


@given(TEXTS)
def test_doubtful_lines_are_those_of_the_twin(text):
    doubtful = twin.doubtful(text)
    covered = np.zeros(len(text) + 1, bool)
    for _, begin, end, after_tag in _core.doubtful_lines([text]).tolist():
        covered[begin:end] = True
        assert bool(after_tag) == ("<" in text[:begin])
    at = 0
    for line, wanted in zip(text.split("\n"), doubtful, strict=True):
        assert covered[at : at + len(line)].all() == wanted or not line
        at += len(line) + 1


def test_each_threshold_removes_a_text_by_its_name():
    fine = " ".join(f"the text and word{number} number{number * 7 % 11} of\n{number}." for number in range(40))
    steps = {
        "length": rules.LengthRules(), "gopher": rules.GopherRules(),
        "gopher-repetition": rules.RepetitionRules(), "fineweb": rules.FineWebRules(),
    }  # fmt: skip
    functions = {
        "length": rules.length_reasons, "gopher": rules.gopher_reasons,
        "gopher-repetition": rules.repetition_reasons, "fineweb": rules.fineweb_reasons,
    }  # fmt: skip
    fine += " twenty words that come again in the same order are enough for each of the n-grams up to ten of them." * 2
    fine += "\n\nthe same line of words is here twice\n\nthe same line of words is here twice\n\n- a...\n\n- a... # x"
    for step, default in steps.items():
        limits = [field.name for field in dataclasses.fields(default) if field.name.startswith(("min_", "max_"))]
        none = dataclasses.replace(default, **dict.fromkeys(limits, -1))
        assert functions[step]([fine], none) == [""]
        for name in limits:
            strict = 1e9 if name.startswith("min_") else 0
            found = functions[step]([fine], dataclasses.replace(none, **{name: strict}))
            assert found == [f"{step}-{name.replace('_', '-')}"]


def test_what_is_no_text_has_no_measures():
    assert rules.repetition_reasons(["", "a"], rules.RepetitionRules(max_top_2=-1)) == ["gopher-repetition-empty", ""]
    assert rules.fineweb_reasons([" \n"], rules.FineWebRules()) == ["fineweb-empty"]
    assert rules.gopher_reasons([], rules.GopherRules()) == [] == rules.length_reasons([], rules.LengthRules())
    with pytest.raises(UnicodeEncodeError):
        _core.repetition_measures(["\ud800"])
    with pytest.raises(IndexError):
        _core.gopher_measures(["abc"], [], [np.array([[1, 4]])])
    with pytest.raises(ValueError, match="array of words for each"):
        _core.gopher_measures(["abc"], [], [])
    with pytest.raises(ValueError, match="begin, end"):
        _core.gopher_measures(["abc"], [], [np.array([1, 4])])
    for words in ([[0, 2], [1, 3]], [[2, 3], [0, 1]]):
        with pytest.raises(ValueError, match="before the last one ended"):
            _core.gopher_measures(["abc"], [], [np.array(words)])
    for word in ([1, 3], [0, 2], [2, 3], [2, 4]):
        with pytest.raises(ValueError, match="inside a character"):
            _core.gopher_measures(["\u4e2d\u6587"], [], [np.array([word])])


@pytest.mark.timeout(60)
def test_kelvin_signs_take_linear_time():
    text = "\u212a " * 1_000_000 + "use coo\u212aies."
    assert rules.c4_texts([text, text[:-13] + "."], rules.C4Rules(min_sentences=1))[1] == ["c4-min-sentences", ""]


def test_a_text_that_repeats_itself_endlessly_takes_linear_time():
    text = "ab " * 200_000
    assert _core.repetition_measures([text])[0][-1] > 0.6
    assert _core.fineweb_measures(["x\n" * 200_000], 30)[0][3] > 0.9
